// What the device headers take from the embedded Clang and older ones lack:
// a * b + c with one rounding per lane. Included before all else.

#ifndef KILN_TESTS_TEMPLATES_ELEMENTWISE_FMA_H_
#define KILN_TESTS_TEMPLATES_ELEMENTWISE_FMA_H_

template <class V>
inline V ElementwiseFma(V a, V b, V c) {
  for (unsigned i = 0; i < sizeof(V) / sizeof(float); ++i) {
    c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  }
  return c;
}

#define __builtin_elementwise_fma ElementwiseFma

#endif  // KILN_TESTS_TEMPLATES_ELEMENTWISE_FMA_H_
