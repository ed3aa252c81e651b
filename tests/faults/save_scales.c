/* save_scales FILE: saves a scale state on an emulated device, and loads it again from a regular file. */
#define _DEFAULT_SOURCE
#define _ISOC11_SOURCE
#include <float8/float8.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

static int check(float8_status status) {
  if (status == FLOAT8_OK) return 1;
  fprintf(stderr, "save_scales: %s\n", float8_last_error());
  return 0;
}

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const float8_context_options options = {
      .struct_size = sizeof options, .emulate = 1, .no_table = 1};
  float8_context* context = NULL;
  if (!check(float8_context_create(0, &options, &context))) return 2;
  const float8_linear_desc desc = {
      .struct_size = sizeof desc, .m_max = 16, .n = 16, .k = 16, .recipe = "delayed"};
  enum { kLinears = 40 };
  const float8_linear* linears[kLinears];
  for (int i = 0; i < kLinears; ++i) {
    float8_linear* linear = NULL;
    if (!check(float8_linear_plan(context, &desc, &linear))) return 2;
    linears[i] = linear;
  }
  const float8_scales_desc of = {.struct_size = sizeof of, .linears = linears, .count = kLinears};
  float8_scales* scales = NULL;
  if (!check(float8_scales_plan(context, &of, &scales))) return 2;
  void* state = aligned_alloc(256, (float8_scales_bytes(scales) + 255) / 256 * 256);
  if (state == NULL || !check(float8_scales_init(scales, state, NULL))) return 2;
  if (!check(float8_scales_save_file(scales, state, argv[1], NULL))) return 1;
  struct stat info;
  if (stat(argv[1], &info) == 0 && !S_ISREG(info.st_mode)) return 0;
  return check(float8_scales_load_file(scales, state, argv[1], NULL)) ? 0 : 3;
}
