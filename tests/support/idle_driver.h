// IdleDriver: a CUDA driver that agrees with everything and does nothing. It
// keeps no log and no state, so any number of threads may call it.

#ifndef KILN_TESTS_SUPPORT_IDLE_DRIVER_H_
#define KILN_TESTS_SUPPORT_IDLE_DRIVER_H_

#include "runtime/driver.h"

namespace kiln::testing {

// One device of compute capability 9.0, whose context is current everywhere.
// Knows the kernels of TinyCudaSection, in whatever image.
kiln_driver_t IdleDriver();

}  // namespace kiln::testing

#endif  // KILN_TESTS_SUPPORT_IDLE_DRIVER_H_
