/* A library for LD_PRELOAD whose n-th allocation fails once.
 *   FLOAT8_MALLOC_AT     n, from 1; 0 or none only counts
 *   FLOAT8_MALLOC_FILE   a file into which the count of allocations is written at the end
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

extern void* __libc_malloc(size_t bytes);
extern void* __libc_calloc(size_t count, size_t bytes);
extern void* __libc_realloc(void* old, size_t bytes);
extern void* __libc_memalign(size_t alignment, size_t bytes);

static uint64_t g_at;
static uint64_t g_count;
static int g_counts;

/* The loader's and the start's own allocations are not counted: nothing of the program runs yet. */
__attribute__((constructor)) static void begin(void) {
  const char* at = getenv("FLOAT8_MALLOC_AT");
  g_at = at == NULL ? 0 : strtoull(at, NULL, 10);
  g_counts = 1;
}

__attribute__((destructor)) static void end(void) {
  const char* file = getenv("FLOAT8_MALLOC_FILE");
  char text[32];
  if (file == NULL) return;
  const int length = snprintf(text, sizeof text, "%llu", (unsigned long long)g_count);
  const int fd = open(file, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return;
  (void)!write(fd, text, (size_t)length);
  close(fd);
}

static int fails(void) {
  if (!g_counts || __atomic_add_fetch(&g_count, 1, __ATOMIC_RELAXED) != g_at) return 0;
  errno = ENOMEM;
  return 1;
}

void* malloc(size_t bytes) {
  return fails() ? NULL : __libc_malloc(bytes);
}
void* calloc(size_t count, size_t bytes) {
  return fails() ? NULL : __libc_calloc(count, bytes);
}
void* realloc(void* old, size_t bytes) {
  return fails() ? NULL : __libc_realloc(old, bytes);
}
void* memalign(size_t alignment, size_t bytes) {
  return fails() ? NULL : __libc_memalign(alignment, bytes);
}
void* aligned_alloc(size_t alignment, size_t bytes) {
  return memalign(alignment, bytes);
}
int posix_memalign(void** to, size_t alignment, size_t bytes) {
  void* memory = memalign(alignment, bytes);
  if (memory == NULL) return ENOMEM;
  *to = memory;
  return 0;
}
