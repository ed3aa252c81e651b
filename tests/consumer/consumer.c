/* A C99 program over the C interface: what fails says why, and nothing needs a GPU to be refused.
 */
#include <float8/float8.h>
#include <stdio.h>
#include <string.h>

int main(void) {
  float8_context* context = NULL;
  float8_linear* linear = NULL;
  float8_linear_desc desc;
  float8_status status;

  if (float8_linear_plan(NULL, NULL, &linear) != FLOAT8_INVALID_ARGUMENT || linear != NULL ||
      strlen(float8_last_error()) == 0) {
    puts("a plan without a context was not refused");
    return 1;
  }
  float8_context_destroy(NULL);
  float8_linear_destroy(NULL);

  status = float8_context_create(0, NULL, &context);
  printf("float8 %s: %s: %s\n", float8_version(), float8_status_string(status),
         float8_last_error());
  if (status != FLOAT8_OK) {
    return context == NULL && (status == FLOAT8_ENVIRONMENT || status == FLOAT8_UNSUPPORTED) ? 0
                                                                                             : 1;
  }
  memset(&desc, 0, sizeof desc); /* struct_size 0: a struct that nobody filled */
  status = float8_linear_plan(context, &desc, &linear);
  float8_context_destroy(context);
  return status == FLOAT8_INVALID_ARGUMENT && linear == NULL ? 0 : 1;
}
