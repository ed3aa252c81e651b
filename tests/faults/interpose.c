/* A library for LD_PRELOAD that makes one file operation of a program fail, or kills the program there.
 *
 *   FLOAT8_FAULT_UNDER   a folder; operations on files elsewhere are left alone and not counted
 *   FLOAT8_FAULT_FILE    a file of kKinds + 1 words of 8 bytes, in which the operations of each kind
 *                        are counted, also over the processes that share it; the last word counts the
 *                        faults that happened
 *   FLOAT8_FAULT_CALL    the kind that is to fail, a name of kNames
 *   FLOAT8_FAULT_AT      the n-th operation of that kind, from 1; 0 or none only counts
 *   FLOAT8_FAULT_DO      fail         the call fails with an error that fits it
 *                        short        half of a write happens, then the call fails
 *                        kill         SIGKILL before the call
 *                        kill_short   half of a write happens, then SIGKILL
 *                        kill_after   SIGKILL after the call
 *   FLOAT8_FAULT_UNREADABLE   folders may be written to and not read, as those of mode 0300: this also
 *                        holds for root
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { kOpen, kOpenRead, kWrite, kFsync, kRename, kMkdir, kTruncate, kUnlink, kLink, kKinds };
static const char* const kNames[kKinds] = {"open",  "open_read", "write",  "fsync", "rename",
                                           "mkdir", "truncate",  "unlink", "link"};
static const int kErrors[kKinds] = {EMFILE, EMFILE, ENOSPC, EIO, EIO, ENOSPC, ENOSPC, EIO, EIO};
enum action { kFail, kShort, kKill, kKillShort, kKillAfter, kActions };
static const char* const kActionNames[kActions] = {"fail", "short", "kill", "kill_short",
                                                   "kill_after"};

static const char* g_under;
static uint64_t* g_counts;
static int g_kind = -1;
static int g_action = kFail;
static uint64_t g_at;
static int g_unreadable;

static int index_of(const char* text, const char* const* names, int count) {
  for (int i = 0; text != NULL && i < count; ++i) {
    if (strcmp(text, names[i]) == 0) return i;
  }
  return -1;
}

static void* real(const char* name) {
  void* function = dlsym(RTLD_NEXT, name);
  if (function == NULL) abort();
  return function;
}
#define REAL(name) ((__typeof__(&name))real(#name))

__attribute__((constructor)) static void begin(void) {
  const char* file = getenv("FLOAT8_FAULT_FILE");
  g_under = getenv("FLOAT8_FAULT_UNDER");
  if (file == NULL || g_under == NULL) return;
  const int fd = REAL(open)(file, O_RDWR | O_CLOEXEC);
  if (fd < 0) abort();
  void* shared =
      mmap(NULL, sizeof(uint64_t) * (kKinds + 1), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (shared == MAP_FAILED) abort();
  const char* at = getenv("FLOAT8_FAULT_AT");
  g_kind = index_of(getenv("FLOAT8_FAULT_CALL"), kNames, kKinds);
  g_action = index_of(getenv("FLOAT8_FAULT_DO"), kActionNames, kActions);
  g_at = at == NULL ? 0 : strtoull(at, NULL, 10);
  g_unreadable = getenv("FLOAT8_FAULT_UNREADABLE") != NULL;
  g_counts = shared;
}

static int is_under(const char* path) {
  const size_t length = strlen(g_under);
  return strncmp(path, g_under, length) == 0 && (path[length] == '/' || path[length] == '\0');
}

static int fd_is_under(int fd) {
  char link[64];
  char path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t n = readlink(link, path, sizeof path - 1);
  if (n < 0) return 0;
  path[n] = '\0';
  return is_under(path);
}

static int at_is_under(int directory, const char* path) {
  if (path == NULL) return 0;
  if (path[0] == '/') return is_under(path);
  if (directory != AT_FDCWD) return fd_is_under(directory);
  char here[4096];
  return getcwd(here, sizeof here) != NULL && is_under(here);
}

/* What happens to this operation: one of enum action, or -1 for nothing. A kill before the call does
 * not return. */
static int meet(enum kind kind, int counts) {
  if (g_counts == NULL || !counts) return -1;
  const uint64_t n = __atomic_add_fetch(&g_counts[kind], 1, __ATOMIC_SEQ_CST);
  if ((int)kind != g_kind || n != g_at || g_action < 0) return -1;
  __atomic_add_fetch(&g_counts[kKinds], 1, __ATOMIC_SEQ_CST);
  if (g_action == kKill || (g_action == kKillShort && kind != kWrite)) raise(SIGKILL);
  return g_action;
}

static int fails(enum kind kind, int action) {
  if (action != kFail && action != kShort) return 0;
  errno = kErrors[kind];
  return 1;
}

/* Makes the call unless it is to fail, and is killed after it if that is to happen. */
#define DO(kind, counts, failed, call)   \
  const int met = meet(kind, counts);    \
  if (fails(kind, met)) return failed;   \
  __typeof__(call) result = call;        \
  if (met == kKillAfter) raise(SIGKILL); \
  return result

#define WRITE(fd, bytes, half, call)                                 \
  const int met = meet(kWrite, g_counts != NULL && fd_is_under(fd)); \
  if (met == kShort || met == kKillShort) {                          \
    if ((bytes) > 1) half;                                           \
    if (met == kKillShort) raise(SIGKILL);                           \
  }                                                                  \
  if (fails(kWrite, met)) return -1;                                 \
  const ssize_t result = call;                                       \
  if (met == kKillAfter) raise(SIGKILL);                             \
  return result

ssize_t write(int fd, const void* from, size_t bytes) {
  WRITE(fd, bytes, (void)!REAL(write)(fd, from, bytes / 2), REAL(write)(fd, from, bytes));
}
ssize_t pwrite(int fd, const void* from, size_t bytes, off_t at) {
  WRITE(fd, bytes, (void)!REAL(pwrite)(fd, from, bytes / 2, at), REAL(pwrite)(fd, from, bytes, at));
}
ssize_t pwrite64(int fd, const void* from, size_t bytes, off64_t at) {
  WRITE(fd, bytes, (void)!REAL(pwrite64)(fd, from, bytes / 2, at),
        REAL(pwrite64)(fd, from, bytes, at));
}
ssize_t writev(int fd, const struct iovec* parts, int count) {
  WRITE(fd, count > 0 ? parts[0].iov_len : 0,
        (void)!REAL(write)(fd, parts[0].iov_base, parts[0].iov_len / 2),
        REAL(writev)(fd, parts, count));
}

int fsync(int fd) {
  DO(kFsync, g_counts != NULL && fd_is_under(fd), -1, REAL(fsync)(fd));
}
int fdatasync(int fd) {
  DO(kFsync, g_counts != NULL && fd_is_under(fd), -1, REAL(fdatasync)(fd));
}
int ftruncate(int fd, off_t bytes) {
  DO(kTruncate, g_counts != NULL && fd_is_under(fd), -1, REAL(ftruncate)(fd, bytes));
}
int ftruncate64(int fd, off64_t bytes) {
  DO(kTruncate, g_counts != NULL && fd_is_under(fd), -1, REAL(ftruncate64)(fd, bytes));
}

#define UNDER(directory, path) (g_counts != NULL && at_is_under(directory, path))

int rename(const char* from, const char* to) {
  DO(kRename, UNDER(AT_FDCWD, from) || UNDER(AT_FDCWD, to), -1, REAL(rename)(from, to));
}
int renameat(int from_at, const char* from, int to_at, const char* to) {
  DO(kRename, UNDER(from_at, from) || UNDER(to_at, to), -1,
     REAL(renameat)(from_at, from, to_at, to));
}
int renameat2(int from_at, const char* from, int to_at, const char* to, unsigned flags) {
  DO(kRename, UNDER(from_at, from) || UNDER(to_at, to), -1,
     REAL(renameat2)(from_at, from, to_at, to, flags));
}
int link(const char* from, const char* to) {
  DO(kLink, UNDER(AT_FDCWD, to), -1, REAL(link)(from, to));
}
int linkat(int from_at, const char* from, int to_at, const char* to, int flags) {
  DO(kLink, UNDER(to_at, to), -1, REAL(linkat)(from_at, from, to_at, to, flags));
}
int mkdir(const char* path, mode_t mode) {
  DO(kMkdir, UNDER(AT_FDCWD, path), -1, REAL(mkdir)(path, mode));
}
int mkdirat(int directory, const char* path, mode_t mode) {
  DO(kMkdir, UNDER(directory, path), -1, REAL(mkdirat)(directory, path, mode));
}
char* mkdtemp(char* path) {
  DO(kMkdir, UNDER(AT_FDCWD, path), NULL, REAL(mkdtemp)(path));
}
int unlink(const char* path) {
  DO(kUnlink, UNDER(AT_FDCWD, path), -1, REAL(unlink)(path));
}
int unlinkat(int directory, const char* path, int flags) {
  DO(kUnlink, UNDER(directory, path), -1, REAL(unlinkat)(directory, path, flags));
}
int rmdir(const char* path) {
  DO(kUnlink, UNDER(AT_FDCWD, path), -1, REAL(rmdir)(path));
}

/* Opening a file that may be made or changed is another kind than opening one to read it. */
static int for_writing(int flags) {
  return (flags & (O_CREAT | O_TRUNC)) != 0 || (flags & O_ACCMODE) != O_RDONLY;
}
static mode_t mode_of(int flags, va_list list) {
  return (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(list, mode_t) : 0;
}
static int refuses(int directory, const char* path, int flags, int counts) {
  struct stat info;
  if (!g_unreadable || !counts || (flags & O_PATH) != 0 ||
      fstatat(directory, path, &info, 0) != 0 || !S_ISDIR(info.st_mode)) {
    return 0;
  }
  errno = EACCES;
  return 1;
}
#define OPEN(name, directory, call)                                       \
  va_list list;                                                           \
  va_start(list, flags);                                                  \
  const mode_t mode = mode_of(flags, list);                               \
  va_end(list);                                                           \
  if (refuses(directory, path, flags, UNDER(directory, path))) return -1; \
  DO(for_writing(flags) ? kOpen : kOpenRead, UNDER(directory, path), -1, call)

int open(const char* path, int flags, ...) {
  OPEN(open, AT_FDCWD, REAL(open)(path, flags, mode));
}
int open64(const char* path, int flags, ...) {
  OPEN(open64, AT_FDCWD, REAL(open64)(path, flags, mode));
}
int openat(int directory, const char* path, int flags, ...) {
  OPEN(openat, directory, REAL(openat)(directory, path, flags, mode));
}
int openat64(int directory, const char* path, int flags, ...) {
  OPEN(openat64, directory, REAL(openat64)(directory, path, flags, mode));
}
int creat(const char* path, mode_t mode) {
  DO(kOpen, UNDER(AT_FDCWD, path), -1, REAL(creat)(path, mode));
}
int mkstemp(char* path) {
  DO(kOpen, UNDER(AT_FDCWD, path), -1, REAL(mkstemp)(path));
}
int mkstemp64(char* path) {
  DO(kOpen, UNDER(AT_FDCWD, path), -1, REAL(mkstemp64)(path));
}
int mkostemp(char* path, int flags) {
  DO(kOpen, UNDER(AT_FDCWD, path), -1, REAL(mkostemp)(path, flags));
}
int mkostemp64(char* path, int flags) {
  DO(kOpen, UNDER(AT_FDCWD, path), -1, REAL(mkostemp64)(path, flags));
}
