-- A version 1 database as float8 wrote it, for migration tests. Never edited: later versions add files.
PRAGMA application_id = 1178092610;
PRAGMA user_version = 1;
PRAGMA foreign_keys=OFF;
BEGIN TRANSACTION;
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
  mig INTEGER NOT NULL CHECK (mig IN (0, 1))
) STRICT;
INSERT INTO device_class VALUES(1,'8214e9e61a7c8f7beab3214ac94cec45','NVIDIA H100 80GB HBM3',90,132,52428800,85899345920,2619,1980,700,0);
CREATE TABLE device_unit (
  id INTEGER PRIMARY KEY,
  uuid_hash TEXT NOT NULL,           -- hashed: files are shared without naming a fleet
  class_id INTEGER NOT NULL REFERENCES device_class(id),
  UNIQUE (uuid_hash, class_id)
) STRICT;
INSERT INTO device_unit VALUES(1,'65cd89bb984c082bc5f731218747c848',1);
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
  codegen_abi INTEGER NOT NULL       -- raised by hand when emitted kernels change meaning
) STRICT;
INSERT INTO toolchain VALUES(1,'7374297791a5647267c5d660e369e53f','580.65.06','13.0','13.0.48','13.0.2','2.27.7','0.1.0','abc1234',0,1);
CREATE TABLE method (
  id INTEGER PRIMARY KEY,
  key TEXT NOT NULL UNIQUE,
  fidelity TEXT NOT NULL CHECK (fidelity IN ('screen', 'final')),  -- only `final` rows can be best
  spec TEXT NOT NULL CHECK (json_valid(spec))
) STRICT;
INSERT INTO method VALUES(1,'70fee7c9ee27b5fb9e7c4f751e69e094','final','{"blocks":12,"name":"final-v1"}');
CREATE TABLE problem (
  id INTEGER PRIMARY KEY,
  key TEXT NOT NULL UNIQUE,          -- "output/tensorwise/e4m3.e4m3.bf16/tn/m8192n4096k4096/b0f1"
  op TEXT NOT NULL CHECK (op IN ('output', 'grad_input', 'grad_weight', 'linear')),
  recipe TEXT NOT NULL,
  a_dtype TEXT NOT NULL,
  b_dtype TEXT NOT NULL,
  d_dtype TEXT NOT NULL,
  m INTEGER NOT NULL CHECK (m > 0),
  n INTEGER NOT NULL CHECK (n > 0),
  k INTEGER NOT NULL CHECK (k > 0),
  bias INTEGER NOT NULL CHECK (bias IN (0, 1)),
  fast INTEGER NOT NULL CHECK (fast IN (0, 1))
) STRICT;
INSERT INTO problem VALUES(1,'output/tensorwise/e4m3.e4m3.bf16/tn/m8192n4096k4096/b0f1','output','tensorwise','e4m3','e4m3','bf16',8192,4096,4096,0,1);
INSERT INTO problem VALUES(2,'linear/rowwise/e4m3.e4m3.bf16/tn/m8192n4096k4096/b0f1','linear','rowwise','e4m3','e4m3','bf16',8192,4096,4096,0,1);
INSERT INTO problem VALUES(3,'output/tensorwise/e4m3.e4m3.bf16/tn/m16n16k16/b0f1','output','tensorwise','e4m3','e4m3','bf16',16,16,16,0,1);
CREATE TABLE candidate (
  id INTEGER PRIMARY KEY,
  key TEXT NOT NULL UNIQUE,
  impl TEXT NOT NULL,                -- generated, cublaslt, bf16_cublaslt; of a linear: float8, bf16
  config TEXT NOT NULL CHECK (json_valid(config)),
  source_hash TEXT NOT NULL          -- of the emitted source; empty for a library
) STRICT;
INSERT INTO candidate VALUES(1,'21b0ae808195dee3bf7d1408d020a360','cublaslt','{"heuristic":0}','');
INSERT INTO candidate VALUES(2,'d23dd722cced03581a856fb6d9fabda5','generated','{"config":"128x256s4c2x1w2g8"}','0123456789abcdef');
INSERT INTO candidate VALUES(3,'76ea7670e699a8063f5cbc088b5599b1','float8','{}','ff');
INSERT INTO candidate VALUES(4,'84111a927f5bce8063d1c14a84a70e4d','bf16','{}','');
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
  owner TEXT NOT NULL DEFAULT ''     -- the process that measures, while state is `running`
) STRICT;
INSERT INTO run VALUES(1,'e9d8098f-36b3-4572-8e22-84947a68bc9e','["float8-tune","sweep"]',7,1,1,1,'2026-11-21T01:51:53.097Z','2026-11-21T01:51:53.106Z','done','');
INSERT INTO run VALUES(2,'4d407389-2366-4a26-8539-b789923dc253','["float8-tune","sweep"]',7,1,1,1,'2026-11-21T01:51:53.106Z','2026-11-21T01:51:53.106Z','done','');
INSERT INTO run VALUES(3,'1a25ae48-a7eb-436b-a9a6-7806b61d6cda','["float8-tune"]',1,1,1,1,'2026-11-21T01:51:53.107Z',NULL,'running','aaa09e8d-ecfc-4860-b1ee-b4ecaec422ad 31523 500516');
CREATE TABLE trial (
  id INTEGER PRIMARY KEY,
  uuid TEXT NOT NULL UNIQUE,         -- a merge takes each once
  run_id INTEGER NOT NULL REFERENCES run(id),
  problem_id INTEGER NOT NULL REFERENCES problem(id),
  candidate_id INTEGER NOT NULL REFERENCES candidate(id),
  attempt INTEGER NOT NULL DEFAULT 0 CHECK (attempt >= 0),  -- how often a process died in this cell
  state TEXT NOT NULL CHECK (state IN ('planned', 'running', 'ok', 'noisy', 'pruned', 'compile_error',
                                       'launch_error', 'wrong', 'timeout', 'quarantined')),
  reason TEXT,                       -- pruning bound, compiler log, failed check
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
  pair_uuid TEXT,                    -- against the bf16 twin measured interleaved:
  pair_ratio REAL,                   -- bf16 time over this time
  pair_lo REAL,
  pair_hi REAL,
  sm_mhz_mean REAL,
  sm_mhz_min REAL,
  power_w REAL,
  temp_c REAL,
  clock_event_mask INTEGER,          -- NVML's clock event reasons over the window
  at TEXT NOT NULL,                  -- of the last change of state
  -- A CHECK that evaluates to NULL passes, hence coalesce.
  CHECK (state NOT IN ('ok', 'noisy') OR
         coalesce(samples > 0 AND median_ns > 0 AND ci_lo_ns <= median_ns AND median_ns <= ci_hi_ns, 0)),
  CHECK (pair_ratio IS NULL OR coalesce(pair_lo > 0 AND pair_lo <= pair_ratio AND pair_ratio <= pair_hi, 0))
) STRICT;
INSERT INTO trial VALUES(1,'49d9fa72-0702-4ab3-9a74-422c14f9e9dd',1,1,1,0,'ok',NULL,NULL,0.00069999999999999999288,NULL,NULL,168,200000,NULL,'feedbeef',48,1,123456.49999999999999,246.91300000000001092,122221.93499999999767,125925.63000000000465,123086.1304999999993,123950.32600000000092,NULL,NULL,NULL,NULL,1611.5,NULL,698.25,NULL,NULL,'2026-11-21T01:51:53.105Z');
INSERT INTO trial VALUES(2,'72fc6967-b393-43d1-b1fe-25a6bdc945ee',1,1,2,0,'ok',NULL,NULL,0.00069999999999999999288,NULL,NULL,168,200000,NULL,'feedbeef',48,1,123456.49999999999999,246.91300000000001092,122221.93499999999767,125925.63000000000465,123086.1304999999993,123950.32600000000092,NULL,NULL,NULL,NULL,1611.5,NULL,698.25,NULL,NULL,'2026-11-21T01:51:53.105Z');
INSERT INTO trial VALUES(3,'3d760392-dac6-4a4c-84a5-9b284cee4554',2,2,3,0,'ok',NULL,NULL,0.00069999999999999999288,NULL,NULL,168,200000,NULL,'feedbeef',48,1,800000.0,1600.0,792000.0,816000.0,797600.0,803200.0,NULL,1.25,1.2450000000000001065,1.2549999999999998934,1611.5,NULL,698.25,NULL,NULL,'2026-11-21T01:51:53.106Z');
INSERT INTO trial VALUES(4,'4a036951-c6e0-44c7-97fc-ddc966f6d82e',2,2,4,0,'ok',NULL,NULL,0.00069999999999999999288,NULL,NULL,168,200000,NULL,'feedbeef',48,1,1000000.0,2000.0,990000.0,1020000.0,997000.0,1004000.0,NULL,NULL,NULL,NULL,1611.5,NULL,698.25,NULL,NULL,'2026-11-21T01:51:53.106Z');
INSERT INTO trial VALUES(5,'5d2d275f-a499-4178-8921-97a84fd598fe',3,3,1,0,'planned',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,'2026-11-21T01:51:53.107Z');
CREATE INDEX problem_shape ON problem (recipe, op, n, k, m);
CREATE INDEX trial_problem ON trial (problem_id, state, median_ns);
CREATE UNIQUE INDEX trial_cell ON trial (run_id, problem_id, candidate_id);
CREATE TRIGGER trial_is_final BEFORE UPDATE ON trial WHEN OLD.state NOT IN ('planned', 'running')
BEGIN
  SELECT RAISE(ABORT, 'a finished trial is never changed');
END;
CREATE TRIGGER trial_is_kept BEFORE DELETE ON trial WHEN OLD.state NOT IN ('planned', 'running')
BEGIN
  SELECT RAISE(ABORT, 'a finished trial is never deleted');
END;
COMMIT;
