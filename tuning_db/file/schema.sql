-- The tuning database, schema version 5. SQLite >= 3.37 (STRICT). This file is the statement of truth: it is
-- embedded in the program, creates new databases and is printed by `float8-tune db schema`.
-- A number in a column is in the unit that the column's name says. The checksum of a row is XXH3-64 of its
-- other columns (tuning_db/checksum.hpp). docs/database.md has the rules.
PRAGMA application_id = 1178092610;  -- 0x46384442, "F8DB": other programs' files are refused
PRAGMA user_version = 5;             -- older files are migrated, newer ones refused

-- What silicon. The class is what a lookup matches; the unit is provenance alone.
CREATE TABLE device_class (
  id INTEGER PRIMARY KEY,
  key TEXT NOT NULL UNIQUE,          -- hash of the fields below
  name TEXT NOT NULL,                -- "NVIDIA H100 80GB HBM3"
  cc INTEGER NOT NULL,               -- 90
  sm_count INTEGER NOT NULL,
  l2_bytes INTEGER NOT NULL,
  mem_bytes INTEGER NOT NULL,
  mem_clock_mhz INTEGER NOT NULL,
  sm_clock_max_mhz INTEGER NOT NULL,
  power_limit_w INTEGER NOT NULL,    -- an H100 held to 500 W is not the class of one with 700 W
  mig INTEGER NOT NULL CHECK (mig IN (0, 1)),
  checksum INTEGER NOT NULL DEFAULT 0
) STRICT;

-- One GPU can be in several classes over time: its power limit can be changed.
CREATE TABLE device_unit (
  id INTEGER PRIMARY KEY,
  uuid_hash TEXT NOT NULL,           -- hashed: files are shared without naming a fleet
  class_id INTEGER NOT NULL REFERENCES device_class(id),
  checksum INTEGER NOT NULL DEFAULT 0,
  UNIQUE (uuid_hash, class_id)
) STRICT;

-- What software: every field that can change the machine code or the library's choice.
CREATE TABLE toolchain (
  id INTEGER PRIMARY KEY,
  key TEXT NOT NULL UNIQUE,
  driver TEXT NOT NULL,
  cuda_runtime TEXT NOT NULL,
  nvrtc TEXT NOT NULL,
  cublaslt TEXT NOT NULL,
  nccl TEXT NOT NULL,
  tool_version TEXT NOT NULL,
  git_sha TEXT NOT NULL,
  git_dirty INTEGER NOT NULL CHECK (git_dirty IN (0, 1)),
  codegen_abi INTEGER NOT NULL,      -- raised by hand when emitted kernels change meaning
  checksum INTEGER NOT NULL DEFAULT 0
) STRICT;

-- How it was measured. Times are compared only within one method.
CREATE TABLE method (
  id INTEGER PRIMARY KEY,
  key TEXT NOT NULL UNIQUE,
  fidelity TEXT NOT NULL CHECK (fidelity IN ('screen', 'final')),  -- only `final` rows can be best
  spec TEXT NOT NULL CHECK (json_valid(spec)),
  checksum INTEGER NOT NULL DEFAULT 0
) STRICT;

-- The key says all of a problem; the columns beside it are what queries ask for. The program knows the
-- names of operations and of their dims (recipes/problem.hpp), so a new one needs no new schema.
CREATE TABLE problem (
  id INTEGER PRIMARY KEY,
  key TEXT NOT NULL UNIQUE,          -- "output/tensorwise+fast/e4m3.e4m3.bf16/m8192n4096k4096"
  op TEXT NOT NULL,
  recipe TEXT NOT NULL,
  dims TEXT NOT NULL CHECK (json_valid(dims)),  -- {"m":8192,"n":4096,"k":4096}
  checksum INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX problem_recipe ON problem (recipe, op);

CREATE TABLE candidate (
  id INTEGER PRIMARY KEY,
  key TEXT NOT NULL UNIQUE,
  impl TEXT NOT NULL,                -- generated, cublaslt, bf16_cublaslt: a GEMM; float8, bf16: the rest
  config TEXT NOT NULL CHECK (json_valid(config)),
  source_hash TEXT NOT NULL,         -- of the emitted source; empty for a library
  checksum INTEGER NOT NULL DEFAULT 0
) STRICT;

-- One sweep: one device, one toolchain, one method. It stops when one of them changes, so they are its
-- columns and not every trial's.
CREATE TABLE run (
  id INTEGER PRIMARY KEY,
  uuid TEXT NOT NULL UNIQUE,
  argv TEXT NOT NULL CHECK (json_valid(argv)),
  seed INTEGER NOT NULL,             -- the 64 bits of an unsigned number
  unit_id INTEGER NOT NULL REFERENCES device_unit(id),
  toolchain_id INTEGER NOT NULL REFERENCES toolchain(id),
  method_id INTEGER NOT NULL REFERENCES method(id),
  started_at TEXT NOT NULL,          -- UTC, 2026-01-31T23:59:59.000Z
  ended_at TEXT,
  -- imported: its trials came from another file, it cannot be resumed in this one
  state TEXT NOT NULL CHECK (state IN ('running', 'done', 'interrupted', 'crashed', 'imported')),
  owner TEXT NOT NULL DEFAULT '',    -- the process that measures, while state is `running`
  checksum INTEGER NOT NULL DEFAULT 0
) STRICT;

-- One candidate on one problem in one run, in planned order. planned -> running -> a terminal state; a
-- terminal row is never changed: a better number is a new row of a new run.
CREATE TABLE trial (
  id INTEGER PRIMARY KEY,
  uuid TEXT NOT NULL UNIQUE,         -- a merge takes each once
  run_id INTEGER NOT NULL REFERENCES run(id),
  problem_id INTEGER NOT NULL REFERENCES problem(id),
  candidate_id INTEGER NOT NULL REFERENCES candidate(id),
  attempt INTEGER NOT NULL DEFAULT 0 CHECK (attempt >= 0),  -- how often a process died in this cell
  state TEXT NOT NULL CHECK (state IN ('planned', 'running', 'ok', 'noisy', 'pruned', 'compile_error',
                                       'launch_error', 'wrong', 'timeout', 'quarantined')),
  reason TEXT,                       -- for people: pruning bound, compiler log, failed check
  predicted_ns REAL,                 -- the cost model's word at plan time, so that it can be scored
  rel_err REAL,                      -- verification, always before timing
  sqnr_db REAL,
  compile_ms REAL,
  registers INTEGER,
  smem_bytes INTEGER,
  spill_bytes INTEGER,
  cubin_hash TEXT,
  samples INTEGER,
  samples_dropped INTEGER,
  median_ns REAL,
  mad_ns REAL,
  p05_ns REAL,
  p95_ns REAL,
  ci_lo_ns REAL,
  ci_hi_ns REAL,
  pair_uuid TEXT,                    -- against the bf16 baseline measured interleaved:
  pair_ratio REAL,                   -- bf16 time over this time
  pair_lo REAL,
  pair_hi REAL,
  sm_mhz_mean REAL,
  sm_mhz_min REAL,
  power_w REAL,
  temp_c REAL,
  clock_event_mask INTEGER,          -- NVML's clock event reasons over the window
  at TEXT NOT NULL,                  -- of the last change of state
  screened_ns REAL CHECK (screened_ns > 0),  -- the time of the screening that the trial lost
  checksum INTEGER NOT NULL DEFAULT 0,
  -- A CHECK that evaluates to NULL passes, hence coalesce.
  CHECK (state NOT IN ('ok', 'noisy') OR
         coalesce(samples > 0 AND median_ns > 0 AND ci_lo_ns <= median_ns AND median_ns <= ci_hi_ns, 0)),
  CHECK (pair_ratio IS NULL OR coalesce(pair_lo > 0 AND pair_lo <= pair_ratio AND pair_ratio <= pair_hi, 0))
) STRICT;
CREATE INDEX trial_problem ON trial (problem_id, state, median_ns);
-- A run plans a cell once: this makes a resume exact.
CREATE UNIQUE INDEX trial_cell ON trial (run_id, problem_id, candidate_id);

-- The kernels that a trial of an operation of several parts took: one for each part, or none.
CREATE TABLE trial_kernel (
  id INTEGER PRIMARY KEY,
  trial_id INTEGER NOT NULL REFERENCES trial(id) ON DELETE CASCADE,
  part TEXT NOT NULL,                -- of a linear: output, grad_input, grad_weight
  provider TEXT NOT NULL,            -- generated, cublaslt
  config TEXT NOT NULL,              -- a configuration, or h and the number of a heuristic
  checksum INTEGER NOT NULL DEFAULT 0,
  UNIQUE (trial_id, part)
) STRICT;

-- How near the tensors of a trial of attention come to fp64, on data of each kind.
CREATE TABLE accuracy (
  id INTEGER PRIMARY KEY,
  trial_id INTEGER NOT NULL REFERENCES trial(id) ON DELETE CASCADE,
  data TEXT NOT NULL,                -- normal, outlier, bias, sharp
  tensor TEXT NOT NULL,              -- O, dQ, dK, dV
  sqnr_db REAL NOT NULL,
  cosine REAL NOT NULL,
  rmse REAL NOT NULL,
  checksum INTEGER NOT NULL DEFAULT 0,
  UNIQUE (trial_id, data, tensor)
) STRICT;

-- Storing its checksum is the one change that a finished trial takes.
CREATE TRIGGER trial_is_final BEFORE UPDATE ON trial
WHEN OLD.state NOT IN ('planned', 'running') AND OLD.checksum = NEW.checksum
BEGIN
  SELECT RAISE(ABORT, 'a finished trial is never changed');
END;
-- `float8-tune db gc` switches triggers off for its own connection.
CREATE TRIGGER trial_is_kept BEFORE DELETE ON trial WHEN OLD.state NOT IN ('planned', 'running')
BEGIN
  SELECT RAISE(ABORT, 'a finished trial is never deleted');
END;
CREATE TRIGGER trial_kernel_is_final BEFORE UPDATE ON trial_kernel WHEN OLD.checksum = NEW.checksum
BEGIN
  SELECT RAISE(ABORT, 'a finished trial is never changed');
END;
CREATE TRIGGER trial_kernel_is_kept BEFORE DELETE ON trial_kernel
BEGIN
  SELECT RAISE(ABORT, 'a finished trial is never deleted');
END;
CREATE TRIGGER accuracy_is_final BEFORE UPDATE ON accuracy WHEN OLD.checksum = NEW.checksum
BEGIN
  SELECT RAISE(ABORT, 'a finished trial is never changed');
END;
CREATE TRIGGER accuracy_is_kept BEFORE DELETE ON accuracy
BEGIN
  SELECT RAISE(ABORT, 'a finished trial is never deleted');
END;
