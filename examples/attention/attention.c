/* Computes causal attention, O = softmax(Q K^T / sqrt(d)) V, and its gradients in fp8, and prints how far they are from the
 * exact ones.
 *
 *   attention              on GPU 0
 *   attention --emulate    on an emulated device, without a GPU
 *
 * Exit status: 0 where the results are good, 1 where something failed, 2 where this machine has no Hopper GPU. */
#include <dlfcn.h>
#include <float8/attention.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Tensors are [batch][tokens][heads][head]. Two heads of queries share one of keys and values. */
enum { kBatch = 1, kTokens = 256, kHeadsQ = 4, kHeadsKv = 2, kHead = 64 };
enum { kOfQ = kBatch * kTokens * kHeadsQ * kHead, kOfKv = kBatch * kTokens * kHeadsKv * kHead };

typedef uint16_t bf16; /* the upper half of a float */

static void fail(const char* what, const char* why) {
  fprintf(stderr, "attention: %s: %s\n", what, why);
  exit(1);
}
static void check(float8_status status, const char* call) {
  if (status != FLOAT8_OK) fail(call, float8_last_error());
}
#define OK(call) check(call, #call)

/* Just enough of the CUDA driver, opened at run time so that the example builds without a toolkit. An emulated device has
 * its memory on the host. A trainer has its own allocator. */
static int (*mem_alloc)(uint64_t*, size_t);
static int (*copy_to_device)(uint64_t, const void*, size_t);
static int (*copy_to_host)(void*, uint64_t, size_t);

static void cuda(int result, const char* call) {
  char text[32];
  snprintf(text, sizeof text, "error %d", result);
  if (result != 0) fail(call, text);
}
/* `function` is the address of a pointer to a function, which ISO C does not convert from dlsym's pointer. */
static void resolve(void* library, const char* name, void* function) {
  void* const symbol = dlsym(library, name);
  if (symbol == NULL) fail(name, "libcuda does not have it");
  memcpy(function, &symbol, sizeof symbol);
}
static void open_driver(void) {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  void* context = NULL;
  int (*init)(unsigned) = NULL;
  int (*retain)(void**, int) = NULL;
  int (*set_current)(void*) = NULL;
  if (library == NULL) fail("libcuda.so.1", dlerror());
  resolve(library, "cuInit", &init);
  resolve(library, "cuDevicePrimaryCtxRetain", &retain);
  resolve(library, "cuCtxSetCurrent", &set_current);
  resolve(library, "cuMemAlloc_v2", &mem_alloc);
  resolve(library, "cuMemcpyHtoD_v2", &copy_to_device);
  resolve(library, "cuMemcpyDtoH_v2", &copy_to_host);
  cuda(init(0), "cuInit");
  cuda(retain(&context, 0), "cuDevicePrimaryCtxRetain");
  cuda(set_current(context), "cuCtxSetCurrent");
}

/* The memory is given back when the process ends. */
static void* allocate(size_t bytes) {
  static void* kept[32]; /* on the host, where leak checkers look for it */
  static size_t count = 0;
  uint64_t pointer = 0;
  if (mem_alloc != NULL) {
    cuda(mem_alloc(&pointer, bytes == 0 ? 16 : bytes), "cuMemAlloc");
    return (void*)(uintptr_t)pointer;
  }
  if (count == sizeof kept / sizeof *kept) fail("allocate", "too many buffers");
  kept[count] = malloc(bytes == 0 ? 16 : bytes); /* aligned to 16 bytes, as float8 needs it */
  if (kept[count] == NULL) fail("allocate", "out of memory");
  return kept[count++];
}
static void* upload(const bf16* values, size_t count) {
  void* const pointer = allocate(count * sizeof *values);
  if (mem_alloc == NULL) {
    memcpy(pointer, values, count * sizeof *values);
  } else {
    cuda(copy_to_device((uintptr_t)pointer, values, count * sizeof *values), "cuMemcpyHtoD");
  }
  return pointer;
}
/* Waits for the work on the default stream. */
static void download(bf16* values, const void* pointer, size_t count) {
  if (mem_alloc == NULL) {
    memcpy(values, pointer, count * sizeof *values);
  } else {
    cuda(copy_to_host(values, (uintptr_t)pointer, count * sizeof *values), "cuMemcpyDtoH");
  }
}

static double value(bf16 x) {
  const uint32_t bits = (uint32_t)x << 16;
  float result;
  memcpy(&result, &bits, sizeof result);
  return result;
}
/* Fills a tensor with random values, about normal, that bf16 represents exactly. */
static void fill(bf16* values, size_t count) {
  static uint64_t state = 1;
  for (size_t i = 0; i < count; ++i) {
    float sample = -6;
    uint32_t bits;
    for (int j = 0; j < 12; ++j) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      sample += (float)(state >> 40) / (1 << 24);
    }
    memcpy(&bits, &sample, sizeof bits);
    values[i] = (bf16)(bits >> 16);
  }
}

static bf16 q[kOfQ], k[kOfKv], v[kOfKv], dout[kOfQ]; /* what is given */
static bf16 o[kOfQ], dq[kOfQ], dk[kOfKv], dv[kOfKv]; /* what fp8 computes of it */
static double exact_o[kOfQ], exact_dq[kOfQ], exact_dk[kOfKv], exact_dv[kOfKv];

static size_t place(int batch, int token, int head, int heads) {
  return (((size_t)batch * kTokens + token) * heads + head) * kHead;
}
static double dot(const bf16* a, const bf16* b) {
  double sum = 0;
  for (int c = 0; c < kHead; ++c) sum += value(a[c]) * value(b[c]);
  return sum;
}
/* Computes o and dq of a query of a head, and adds its part to the gradients of the keys that it has. */
static void attend(int batch, int head, int query) {
  const size_t own = place(batch, query, head, kHeadsQ);
  const double scale = 1 / sqrt((double)kHead);
  double p[kTokens], sum = 0, delta = 0;
  for (int j = 0; j <= query; ++j) {
    const size_t key = place(batch, j, head * kHeadsKv / kHeadsQ, kHeadsKv);
    sum += p[j] = exp(dot(q + own, k + key) * scale);
  }
  for (int j = 0; j <= query; ++j) {
    const size_t key = place(batch, j, head * kHeadsKv / kHeadsQ, kHeadsKv);
    p[j] /= sum;
    delta += p[j] * dot(dout + own, v + key);
    for (int c = 0; c < kHead; ++c) exact_o[own + c] += p[j] * value(v[key + c]);
  }
  for (int j = 0; j <= query; ++j) {
    const size_t key = place(batch, j, head * kHeadsKv / kHeadsQ, kHeadsKv);
    const double ds = p[j] * (dot(dout + own, v + key) - delta) * scale;
    for (int c = 0; c < kHead; ++c) {
      exact_dq[own + c] += ds * value(k[key + c]);
      exact_dk[key + c] += ds * value(q[own + c]);
      exact_dv[key + c] += p[j] * value(dout[own + c]);
    }
  }
}
/* Returns the ratio of signal to noise in dB. */
static double sqnr_db(const bf16* result, const double* exact, size_t count) {
  double signal = 0, noise = 0;
  for (size_t i = 0; i < count; ++i) {
    const double error = exact[i] - value(result[i]);
    signal += exact[i] * exact[i];
    noise += error * error;
  }
  return 10 * log10(signal / noise);
}

static float8_heads heads_of(void* data, int64_t count) {
  const float8_heads heads = {.data = data,
                              .batch_stride = kTokens * count * kHead,
                              .head_stride = kHead,
                              .token_stride = count * kHead};
  return heads;
}

/* Enqueues the forward and the backward on the default stream, and takes the results. */
static void run(float8_context* context) {
  const float8_attention_desc desc = {.struct_size = sizeof desc,
                                      .heads_q = kHeadsQ,
                                      .heads_kv = kHeadsKv,
                                      .head_dim = kHead,
                                      .causal = 1,
                                      .dtype = FLOAT8_BF16,
                                      .recipe = FLOAT8_ATTENTION_FP8};
  const float8_attention_sizes sizes = {.batch = kBatch, .tokens_q = kTokens, .tokens_kv = kTokens};
  float8_attention_forward_args forward = {.struct_size = sizeof forward, .sizes = sizes};
  float8_attention_backward_args backward = {.struct_size = sizeof backward, .sizes = sizes};
  float8_attention* attention = NULL;
  OK(float8_attention_plan(context, &desc, &attention));

  forward.q = heads_of(upload(q, kOfQ), kHeadsQ);
  forward.k = heads_of(upload(k, kOfKv), kHeadsKv);
  forward.v = heads_of(upload(v, kOfKv), kHeadsKv);
  forward.o = allocate(sizeof o);
  forward.lse = allocate(sizeof(float) * kBatch * kHeadsQ * kTokens);
  forward.saved.bytes = float8_attention_saved_bytes(attention, &sizes);
  forward.saved.data = allocate(forward.saved.bytes);
  forward.workspace.bytes = float8_attention_workspace_bytes(attention, &sizes);
  forward.workspace.data = allocate(forward.workspace.bytes);
  OK(float8_attention_forward(attention, &forward, NULL));

  backward.dout = heads_of(upload(dout, kOfQ), kHeadsQ);
  backward.o = forward.o;
  backward.lse = forward.lse;
  backward.saved = forward.saved; /* it has q, k and v in fp8 */
  backward.workspace.bytes = float8_attention_backward_workspace_bytes(attention, &sizes);
  backward.workspace.data = allocate(backward.workspace.bytes);
  backward.dq = heads_of(allocate(sizeof dq), kHeadsQ);
  backward.dk = heads_of(allocate(sizeof dk), kHeadsKv);
  backward.dv = heads_of(allocate(sizeof dv), kHeadsKv);
  OK(float8_attention_backward(attention, &backward, NULL));

  download(o, forward.o, kOfQ);
  download(dq, backward.dq.data, kOfQ);
  download(dk, backward.dk.data, kOfKv);
  download(dv, backward.dv.data, kOfKv);
  float8_attention_destroy(attention);
}

int main(int count, char** words) {
  float8_context_options options = {.struct_size = sizeof options};
  float8_context* context = NULL;
  float8_status status;
  double of_o, of_dq, of_dk, of_dv;
  options.emulate = count == 2 && strcmp(words[1], "--emulate") == 0;
  if (count > 2 || (count == 2 && !options.emulate)) fail("usage", "attention [--emulate]");
  status = float8_context_create(0, &options, &context);
  if (status != FLOAT8_OK) {
    fprintf(stderr, "attention: %s\n", float8_last_error());
    return status == FLOAT8_ENVIRONMENT || status == FLOAT8_UNSUPPORTED ? 2 : 1;
  }
  if (!options.emulate) open_driver();

  fill(q, kOfQ), fill(k, kOfKv), fill(v, kOfKv), fill(dout, kOfQ);
  run(context);
  float8_context_destroy(context);

  for (int batch = 0; batch < kBatch; ++batch) {
    for (int head = 0; head < kHeadsQ; ++head) {
      for (int query = 0; query < kTokens; ++query) attend(batch, head, query);
    }
  }
  of_o = sqnr_db(o, exact_o, kOfQ);
  of_dq = sqnr_db(dq, exact_dq, kOfQ);
  of_dk = sqnr_db(dk, exact_dk, kOfKv);
  of_dv = sqnr_db(dv, exact_dv, kOfKv);
  printf(
      "attention of %d tokens in fp8, from the exact results: O %.1f dB, dQ %.1f dB, dK %.1f dB, "
      "dV %.1f dB\n",
      kTokens, of_o, of_dq, of_dk, of_dv);
  return of_o >= 20 && of_dq >= 18 && of_dk >= 18 && of_dv >= 20 ? 0 : 1;
}
