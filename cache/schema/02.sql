-- Schema 2: garbage collection goes by the last use of a plan.

PRAGMA user_version = 2;

-- When a plan last answered, to the day. Apart from the plan, so that noting it
-- rewrites no evidence. Without a row, the plan's own age counts.
CREATE TABLE plan_use (
  plan_id INTEGER PRIMARY KEY REFERENCES plan (id) ON DELETE CASCADE,
  used_unix INTEGER NOT NULL,
  row_digest BLOB NOT NULL
) STRICT;
