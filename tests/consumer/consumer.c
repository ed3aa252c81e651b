/* A C99 program over the C interface: what fails says why, nothing needs a GPU to be refused, and
 * on the emulated device a training step of every kind runs without one.
 */
#include <float8/float8.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { M = 16, N = 48, K = 32 };

static int failures = 0;

static void expect(int holds, const char* what) {
  if (holds) return;
  printf("%s does not hold: %s\n", what, float8_last_error());
  ++failures;
}
#define EXPECT(condition) expect(condition, #condition)
#define OK(call) expect((call) == FLOAT8_OK, #call)

/* Memory that an emulated device can use; malloc aligns it to 16 bytes. */
static void* buffer(size_t bytes) {
  void* memory = malloc(bytes == 0 ? 16 : bytes);
  if (memory == NULL) abort();
  memset(memory, 0xff, bytes);
  return memory;
}

static uint16_t* ones(size_t count) { /* bf16 */
  uint16_t* values = buffer(2 * count);
  while (count > 0) values[--count] = 0x3f80;
  return values;
}

static int all(const uint16_t* values, size_t count, uint16_t bits) {
  while (count > 0) {
    if (values[--count] != bits) return 0;
  }
  return 1;
}

/* x, w and dy of ones: y is K, dx is N and dw is M everywhere. */
static void train(float8_context* context, const char* recipe) {
  uint16_t *x = ones(M * K), *w = ones(N * K), *dy = ones(M * N);
  uint16_t *y = ones(M * N), *dx = ones(M * K), *dw = ones(N * K);
  void *workspace, *saved, *w_fp8, *state, *checkpoint;
  float8_linear* linear = NULL;
  float8_scales* scales = NULL;
  float8_quantizer* quantizer = NULL;
  float8_quantizer_list* casts = NULL;
  const float8_quantizer* quantizers[1];
  const float8_linear* list[1];
  float8_linear_desc desc = {.struct_size = sizeof desc, .m_max = M, .n = N, .k = K};
  float8_scales_desc scales_desc = {.struct_size = sizeof scales_desc, .count = 1};
  float8_forward_args forward = {.struct_size = sizeof forward, .m = M};
  float8_backward_args backward = {.struct_size = sizeof backward, .m = M};
  float8_quantizer_desc weight_desc = {
      .struct_size = sizeof weight_desc, .rows_max = N, .cols = K, .operand = FLOAT8_WEIGHT};
  float8_quantize_args weight = {.struct_size = sizeof weight, .rows = N};
  float8_tensor w_view = {.struct_size = sizeof w_view};
  char text[2000];
  float8_step train_step = {.struct_size = sizeof train_step};
  float8_quantize_list_args weights = {
      .struct_size = sizeof weights, .tensors = &weight, .count = 1, .step = &train_step};
  int32_t first_step = 1;
  int step;

  desc.recipe = recipe;
  OK(float8_linear_plan(context, &desc, &linear));
  if (linear == NULL) return;
  OK(float8_linear_info(linear, text, sizeof text, NULL));
  EXPECT(strstr(text, recipe) != NULL);
  list[0] = linear;
  scales_desc.linears = list;
  OK(float8_scales_plan(context, &scales_desc, &scales));
  weight_desc.recipe = recipe;
  if (float8_quantizer_plan(context, &weight_desc, &quantizer) == FLOAT8_OK) {
    quantizers[0] = quantizer;
    OK(float8_quantizer_list_plan(context, quantizers, 1, &casts));
  } else { /* no GEMM reads the weight in fp8 */
    EXPECT(strcmp(recipe, "bf16") == 0);
  }
  workspace =
      buffer(float8_linear_workspace_bytes(linear) + float8_quantizer_list_workspace_bytes(casts));
  saved = buffer(float8_linear_saved_bytes(linear));
  w_fp8 = buffer(float8_quantizer_tensor_bytes(quantizer));
  state = buffer(float8_scales_bytes(scales));
  checkpoint = buffer(float8_scales_saved_bytes(scales));
  OK(float8_scales_init(scales, state, NULL));
  OK(float8_scales_slots(scales, state, 0, &forward.scales));
  backward.scales = weight.scales = forward.scales;
  forward.step = backward.step = &train_step;
  forward.x.data = backward.x.data = x;
  forward.w.data = backward.w.data = w;
  weight.x.data = w;
  forward.y.data = y;
  forward.saved.data = saved;
  backward.saved.data = saved;
  backward.dy.data = dy;
  backward.dx.data = dx;
  backward.dw.data = dw;
  weight.tensor.data = w_fp8;
  for (step = 0; step < 3; ++step) {
    train_step.first_step = first_step;
    if (step == 2 && casts != NULL) { /* with a weight that is cast before */
      weights.workspace.data = workspace;
      OK(float8_quantize_list(casts, &weights, NULL));
      OK(float8_quantizer_view(quantizer, w_fp8, NULL, N, &w_view));
      forward.w.fp8 = backward.w.fp8 = &w_view;
    }
    forward.workspace.data = workspace;
    OK(float8_linear_forward(linear, &forward, NULL));
    backward.workspace.data = workspace;
    OK(float8_linear_backward(linear, &backward, NULL));
    EXPECT(all(y, M * N, 0x4200));  /* 32 */
    EXPECT(all(dx, M * K, 0x4240)); /* 48 */
    EXPECT(all(dw, N * K, 0x4180)); /* 16 */
    memset(y, 0, 2 * M * N);
    memset(dx, 0, 2 * M * K);
    memset(dw, 0, 2 * N * K);
    OK(float8_scales_sync(scales, state, NULL, NULL));
    OK(float8_scales_first_steps(scales, state, &first_step, 1, NULL));
    EXPECT(first_step == 0);
    OK(float8_scales_save(scales, state, checkpoint, float8_scales_saved_bytes(scales), NULL));
    OK(float8_scales_load(scales, state, checkpoint, float8_scales_saved_bytes(scales), NULL));
  }
  ((char*)checkpoint)[20] ^= 1;
  EXPECT(float8_scales_load(scales, state, checkpoint, float8_scales_saved_bytes(scales), NULL) ==
         FLOAT8_CORRUPT);
  forward.y.data = x;
  forward.workspace.data = workspace;
  EXPECT(float8_linear_forward(linear, &forward, NULL) == FLOAT8_INVALID_ARGUMENT);
  float8_quantizer_list_destroy(casts);
  float8_quantizer_destroy(quantizer);
  float8_scales_destroy(scales);
  float8_linear_destroy(linear);
  free(x), free(w), free(dy), free(y), free(dx), free(dw);
  free(workspace), free(saved), free(w_fp8), free(state), free(checkpoint);
}

int main(void) {
  static const char* const kRecipes[] = {"tensorwise", "rowwise",   "rowwise_with_gw_hp",
                                         "delayed",    "blockwise", "bf16"};
  float8_context* context = NULL;
  float8_linear* linear = NULL;
  float8_linear_desc desc;
  float8_context_options options = {.struct_size = sizeof options};
  float8_status status;
  size_t i;

  EXPECT(float8_linear_plan(NULL, NULL, &linear) == FLOAT8_INVALID_ARGUMENT);
  EXPECT(linear == NULL && strlen(float8_last_error()) > 0);
  float8_context_destroy(NULL);
  float8_linear_destroy(NULL);

  status = float8_context_create(0, NULL, &context);
  printf("float8 %s: %s: %s\n", float8_version(), float8_status_string(status),
         float8_last_error());
  if (status == FLOAT8_OK) {
    memset(&desc, 0, sizeof desc); /* struct_size 0: a struct that nobody filled */
    EXPECT(float8_linear_plan(context, &desc, &linear) == FLOAT8_INVALID_ARGUMENT);
    float8_context_destroy(context);
  } else {
    EXPECT(context == NULL);
    EXPECT(status == FLOAT8_ENVIRONMENT || status == FLOAT8_UNSUPPORTED);
  }

  options.emulate = 1;
  OK(float8_context_create(0, &options, &context));
  for (i = 0; i < sizeof kRecipes / sizeof *kRecipes; ++i) train(context, kRecipes[i]);
  float8_context_destroy(context);
  return failures == 0 ? 0 : 1;
}
