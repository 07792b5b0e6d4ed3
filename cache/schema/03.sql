-- Schema 3: a look-up compares a checksum, which is faster than digests.

PRAGMA user_version = 3;

-- XXH3-128 over the row's encoding, row_digest, preimage and, of a program, its
-- binary (checksum.h). NULL in rows of older builds: those are looked up by
-- their digests. row_digest does not cover it, so that an older build which
-- still has the file open reads the row as before.
ALTER TABLE program ADD COLUMN checksum BLOB;
ALTER TABLE plan ADD COLUMN checksum BLOB;
