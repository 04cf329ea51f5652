// Runs the tests of the kernels that need no Python: products with weights of every format, attention, and whole models.
//
// The right values are computed by plain loops in double precision. The argument is a file of `write_models.py`.
#include "check.h"

int main(int count, char** arguments) {
  using namespace outrider::test;
  check_products();
  check_attention();
  for (int i = 1; i < count; i++) check_models(arguments[i]);
  std::printf("%s\n", failures() ? "some checks failed" : "all checks passed");
  return failures() != 0;
}
