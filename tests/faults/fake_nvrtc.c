/* Stands in for libnvrtc where the cache is tested and not the compiler: a compile takes
 * FLOAT8_FAKE_NVRTC_MS and adds a line with the kernel's name to the file FLOAT8_FAKE_NVRTC_LOG. Its
 * cubins are no code. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
enum { kImageBytes = 20000, kBadInput = 3 };

struct program {
  char name[200];
  char log[400];
  unsigned seed;
};

EXPORT int nvrtcVersion(int* major, int* minor) {
  *major = 13;
  *minor = 0;
  return 0;
}
EXPORT const char* nvrtcGetErrorString(int result) {
  return result == 0 ? "success" : "failure";
}
EXPORT int nvrtcCreateProgram(struct program** to, const char* source, const char* name,
                              int headers, const char* const* texts, const char* const* names) {
  (void)headers;
  (void)texts;
  (void)names;
  struct program* program = calloc(1, sizeof *program);
  if (program == NULL) return 1;
  snprintf(program->name, sizeof program->name, "%s", name);
  for (const char* c = source; *c != '\0'; ++c)
    program->seed = program->seed * 31 + (unsigned char)*c;
  *to = program;
  return 0;
}
EXPORT int nvrtcDestroyProgram(struct program** program) {
  free(*program);
  *program = NULL;
  return 0;
}
EXPORT int nvrtcCompileProgram(struct program* program, int count, const char* const* options) {
  (void)count;
  (void)options;
  const char* ms = getenv("FLOAT8_FAKE_NVRTC_MS");
  if (ms != NULL) usleep((useconds_t)atoi(ms) * 1000);
  const char* log = getenv("FLOAT8_FAKE_NVRTC_LOG");
  if (log != NULL) {
    char line[256];
    const int bytes = snprintf(line, sizeof line, "%s\n", program->name);
    const int fd = open(log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0 || write(fd, line, (size_t)bytes) != bytes) return kBadInput;
    close(fd);
  }
  const size_t length = strlen(program->name) - strlen(".cu");
  snprintf(program->log, sizeof program->log,
           "ptxas info    : Compiling entry function '%.*s' for 'sm_90a'\n"
           "ptxas info    : Used 32 registers\n",
           (int)length, program->name);
  return 0;
}
EXPORT int nvrtcGetProgramLogSize(struct program* program, size_t* bytes) {
  *bytes = strlen(program->log) + 1;
  return 0;
}
EXPORT int nvrtcGetProgramLog(struct program* program, char* to) {
  strcpy(to, program->log);
  return 0;
}
static int image_size(struct program* program, size_t* bytes) {
  (void)program;
  *bytes = kImageBytes;
  return 0;
}
static int image(struct program* program, char* to) {
  memset(to, (int)(program->seed & 0x7f), kImageBytes);
  memcpy(to, "\177ELF", 4);
  return 0;
}
EXPORT int nvrtcGetCUBINSize(struct program* program, size_t* bytes) {
  return image_size(program, bytes);
}
EXPORT int nvrtcGetCUBIN(struct program* program, char* to) {
  return image(program, to);
}
EXPORT int nvrtcGetPTXSize(struct program* program, size_t* bytes) {
  return image_size(program, bytes);
}
EXPORT int nvrtcGetPTX(struct program* program, char* to) {
  return image(program, to);
}
