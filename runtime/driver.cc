#include "runtime/driver.h"

#include <dlfcn.h>
#include <pthread.h>

#include "runtime/status.h"

namespace kiln::runtime {
namespace {

kiln_driver_t g_driver;
bool g_loaded = false;
pthread_mutex_t g_mutex = PTHREAD_MUTEX_INITIALIZER;

// dlsym gives void*; POSIX promises that the representation is that of a
// function pointer.
template <typename Function>
bool Resolve(void* library, const char* symbol, Function* function) {
  void* address = dlsym(library, symbol);
  if (address == nullptr) return false;
  *function = reinterpret_cast<Function>(address);
  return true;
}

kiln_status_t Load(kiln_error_t* error) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return Failure(error, KILN_STATUS_NO_DRIVER)
           << "cannot open the CUDA driver libcuda.so.1; install an NVIDIA "
              "driver of version 12.4 or newer";
  }
  kiln_driver_t driver;
  const char* missing = nullptr;
#define KILN_DRIVER_SYMBOL(member, symbol, parameters)                    \
  if (missing == nullptr && !Resolve(library, #symbol, &driver.member)) { \
    missing = #symbol;                                                    \
  }
#include "runtime/driver_symbols.inc"
#undef KILN_DRIVER_SYMBOL
  if (missing != nullptr) {
    dlclose(library);
    return Failure(error, KILN_STATUS_NO_DRIVER)
           << "the CUDA driver libcuda.so.1 has no " << missing
           << "; install an NVIDIA driver of version 12.4 or newer";
  }
  g_driver = driver;
  return KILN_STATUS_OK;
}

}  // namespace

kiln_status_t RealDriver(const kiln_driver_t** driver, kiln_error_t* error) {
  pthread_mutex_lock(&g_mutex);
  kiln_status_t status = KILN_STATUS_OK;
  if (!g_loaded) {
    status = Load(error);
    g_loaded = status == KILN_STATUS_OK;
  }
  pthread_mutex_unlock(&g_mutex);
  if (status == KILN_STATUS_OK) *driver = &g_driver;
  return status;
}

}  // namespace kiln::runtime
