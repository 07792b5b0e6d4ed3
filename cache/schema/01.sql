-- Schema 1 of the plan cache (index.db), run on an empty file; the files behind
-- it are run on top. README.md says what each table is for, and how to add to
-- them. Never edited: files of this schema exist.
--
-- Every row carries row_digest: SHA-256 over the canonical encoding of its
-- other columns (row_codec.h). Keys are SHA-256 values over their pre-image.
-- NULL in a REAL column stands for "not a number".

PRAGMA application_id = 1263094862;  -- 0x4B494C4E, "KILN"
PRAGMA user_version = 1;

-- Compiled binaries by content; apart from everything else so that scans of
-- the other tables stay cheap.
CREATE TABLE blob (
  id INTEGER PRIMARY KEY,
  digest BLOB NOT NULL UNIQUE CHECK (length(digest) = 32),
  data BLOB NOT NULL
) STRICT;

-- One compiled and inspected binary per build digest.
CREATE TABLE program (
  id INTEGER PRIMARY KEY,
  key BLOB NOT NULL UNIQUE CHECK (length(key) = 32),
  preimage BLOB NOT NULL,
  target TEXT NOT NULL,
  toolchain_name TEXT NOT NULL,
  toolchain_version TEXT NOT NULL,
  toolchain_content BLOB NOT NULL,
  binary_digest BLOB NOT NULL REFERENCES blob (digest),
  kernels TEXT NOT NULL,
  log TEXT NOT NULL,
  compile_seconds REAL,
  created_unix INTEGER NOT NULL,
  host_name TEXT NOT NULL,
  device_name TEXT NOT NULL,
  tool_version TEXT NOT NULL,
  row_digest BLOB NOT NULL
) STRICT;

CREATE INDEX program_binary ON program (binary_digest);

-- Candidates and programs that failed, so that nobody pays for them again.
CREATE TABLE reject (
  id INTEGER PRIMARY KEY,
  key BLOB NOT NULL UNIQUE CHECK (length(key) = 32),
  preimage BLOB NOT NULL,
  stage TEXT NOT NULL
      CHECK (stage IN ('compile', 'inspect', 'verify', 'race')),
  reason TEXT NOT NULL,
  log TEXT NOT NULL,
  created_unix INTEGER NOT NULL,
  host_name TEXT NOT NULL,
  device_name TEXT NOT NULL,
  tool_version TEXT NOT NULL,
  row_digest BLOB NOT NULL
) STRICT;

-- One winner per measure digest.
CREATE TABLE plan (
  id INTEGER PRIMARY KEY,
  key BLOB NOT NULL UNIQUE CHECK (length(key) = 32),
  preimage BLOB NOT NULL,
  plan TEXT NOT NULL,
  measurements INTEGER NOT NULL,
  created_unix INTEGER NOT NULL,
  host_name TEXT NOT NULL,
  device_name TEXT NOT NULL,
  tool_version TEXT NOT NULL,
  row_digest BLOB NOT NULL
) STRICT;

-- The programs of a plan, repeated from its text so that roots can be followed
-- without parsing. No foreign key to program: a plan outlives a damaged program
-- and is whole again once that is recompiled.
CREATE TABLE plan_program (
  plan_id INTEGER NOT NULL REFERENCES plan (id) ON DELETE CASCADE,
  position INTEGER NOT NULL,
  program_key BLOB NOT NULL CHECK (length(program_key) = 32),
  PRIMARY KEY (plan_id, position)
) STRICT, WITHOUT ROWID;

CREATE INDEX plan_program_key ON plan_program (program_key);

-- What happened to each candidate of a plan's race, with every sample.
CREATE TABLE measurement (
  id INTEGER PRIMARY KEY,
  plan_id INTEGER NOT NULL REFERENCES plan (id) ON DELETE CASCADE,
  position INTEGER NOT NULL,
  label TEXT NOT NULL,
  candidate BLOB NOT NULL CHECK (length(candidate) = 32),
  verdict TEXT NOT NULL
      CHECK (verdict IN ('won', 'lost', 'eliminated', 'identical',
                         'rejected')),
  reason TEXT NOT NULL,
  worst_error REAL,
  regret REAL,
  numerics_class TEXT NOT NULL,
  arena_bytes INTEGER NOT NULL,
  registers INTEGER NOT NULL,
  samples BLOB NOT NULL,
  row_digest BLOB NOT NULL,
  UNIQUE (plan_id, position)
) STRICT;

-- Small values that are costly to find out, for example what compiler a library
-- of 100 MB is. Hints, never part of a key; whoever stores one chooses a key
-- that stands for everything the value depends on.
CREATE TABLE memo (
  key BLOB PRIMARY KEY,
  value BLOB NOT NULL,
  row_digest BLOB NOT NULL
) STRICT, WITHOUT ROWID;

-- Work that a process is doing now, by the key of its result. A row whose owner
-- is gone or whose time is over counts as absent.
CREATE TABLE lease (
  key BLOB PRIMARY KEY CHECK (length(key) = 32),
  boot TEXT NOT NULL,
  pid INTEGER NOT NULL,
  start_ticks INTEGER NOT NULL,
  token INTEGER NOT NULL,
  expires_unix INTEGER NOT NULL,
  row_digest BLOB NOT NULL
) STRICT, WITHOUT ROWID;

-- Rows that failed a check, moved here with what could be read of them.
CREATE TABLE quarantine (
  id INTEGER PRIMARY KEY,
  source TEXT NOT NULL,
  key BLOB NOT NULL,
  reason TEXT NOT NULL,
  content BLOB NOT NULL,
  created_unix INTEGER NOT NULL
) STRICT;
