/* Context: a device and the kernels loaded on it. */
#ifndef FLOAT8_CONTEXT_H_
#define FLOAT8_CONTEXT_H_

#include "float8/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct float8_context_options {
  size_t struct_size;
  /* The directory that keeps compiled kernels; nobody else may be able to write to it. It is
   * created if it is missing. NULL means $FLOAT8_CACHE_DIR, else $XDG_CACHE_HOME/float8, else
   * ~/.cache/float8; without any of them kernels are kept in memory alone. */
  const char* cache_dir;
  /* Nonzero switches programmatic dependent launch (PDL) off: a kernel then starts only when its
   * predecessor on the stream has ended. With 0 it may start, and wait, while the predecessor ends.
   */
  int32_t serial_launch;
  /* Nonzero helps to find a mistake: every call that is given a stream, except float8_amax_sync,
   * asks the driver whether its tensors and buffers are memory of the context's device and large
   * enough, and whether its stream belongs to the device's primary CUDA context. The context also
   * remembers earlier calls by the addresses of their buffers, and refuses a backward whose m or
   * w.fp8 is not that of the forward that filled `saved`, and a call without first_step on a
   * scale state that was only initialised. This costs some microseconds a call. */
  int32_t check_pointers;
  /* Nonzero replaces the GPU by a slow device in host memory, for tests of a program on a machine
   * without a GPU. Pointers to tensors are then host pointers, streams are NULL, and every call has
   * done its work when it returns; results are those of an H100 up to the order of sums. It needs
   * no driver, compiler or cache, and `device` is 0 to 7. Its communicators are float8_comms_create's,
   * whose ranks are threads; one of NCCL is refused, and NCCL is never called. It remembers earlier
   * calls as with check_pointers. It is never chosen unless asked for. */
  int32_t emulate;
  /* 0: the context begins with the built-in tuning table of this device, else with that of the
   * nearest class of device; float8_context_info says which. Nonzero: it has none until one is
   * loaded: the cost model chooses kernels, and no layer of a model has a known speedup. */
  int32_t no_table;
  /* Nonzero: the program may copy `saved` to other memory between forward and backward, as frameworks
   * do that offload activations. Then the context remembers no forward by its `saved`. */
  int32_t moves_saved;
  /* Not 0: a linear of a built-in recipe that is planned on a device where its shape was not measured
   * (its n and k, and an m within a factor of 2) is measured first, for at most so many milliseconds:
   * some 10,000 are worth while. float8-tune does it in a process of its own, which takes memory of
   * the device for a while, and the call that plans waits. The program lies in ../bin beside the
   * library, else in PATH; FLOAT8_TUNE names another. What fails is a warning in the log, and the
   * linear is planned as without. Ranks of a host take turns; give ranks of several hosts one table
   * instead (float8_context_load_table), for their kernels would differ. */
  int32_t tune_on_first_use;
  /* The user's database, which keeps what is measured; the first such linear takes what it has from
   * it. NULL means $FLOAT8_DB; FLOAT8_INVALID_ARGUMENT where that is not set and tune_on_first_use is. */
  const char* database;
} float8_context_options;

/* `device` is the CUDA ordinal; `options` may be NULL. The call returns FLOAT8_ENVIRONMENT if there
 * is no driver or it is too old, and FLOAT8_UNSUPPORTED if the device is no Hopper GPU. On failure
 * *out is NULL. */
FLOAT8_API float8_status float8_context_create(int device, const float8_context_options* options,
                                               float8_context** out);
FLOAT8_API void float8_context_destroy(float8_context* context);
/* Replaces the tuning table: linears that are planned from now on choose their kernels, and models
 * their layers, by this file. `float8-tune db export --format table` writes it, with the built-in
 * rows behind those of the database. `hash` may be NULL; else it receives 64 bits of the table's
 * hash, so that ranks can check that all of them loaded the same. A table that is damaged, or has a
 * kernel that cannot be compiled, is refused (FLOAT8_CORRUPT) by its line. On failure the table in
 * use stays. */
FLOAT8_API float8_status float8_context_load_table(float8_context* context, const char* path,
                                                   uint64_t* hash);
/* Gives the tuning table in use as the text of a table file, so that a rank can send it to ranks that
 * have no such file. `hash` may be NULL; else it receives 64 bits of the table's hash, 0 where there is
 * no table, whose text is empty. The other arguments are those of float8_linear_info (below): ask for
 * *needed first, as the text has some 100 KB. */
FLOAT8_API float8_status float8_context_table(const float8_context* context, char* text,
                                              size_t bytes, size_t* needed, uint64_t* hash);
/* Does what float8_context_load_table does with the text of a table, which ends in a NUL: by MPI, or
 * whatever a program has, all ranks get that of one rank, before they plan anything. An empty text
 * leaves the context without a table, as no_table does. */
FLOAT8_API float8_status float8_context_set_table(float8_context* context, const char* text,
                                                  uint64_t* hash);

/* Returns the reserved bytes at the front of every workspace of the context's linears and
 * quantizers (convention 6), 0 for NULL. */
FLOAT8_API size_t float8_workspace_reserved_bytes(const float8_context* context);

/* Describes the device, the options and the tuning table in use in a few lines of text for people.
 * The arguments are those of float8_linear_info (below). */
FLOAT8_API float8_status float8_context_info(const float8_context* context, char* text,
                                             size_t bytes, size_t* needed);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FLOAT8_CONTEXT_H_ */
