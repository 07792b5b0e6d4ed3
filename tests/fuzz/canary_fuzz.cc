// A target with a defect on purpose. Its test passes only when the loop of
// fuzz_main.cc finds it, which proves that the loop can find anything.

#include <cstdint>
#include <cstdlib>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  // No file of the corpus has this.
  if (text.find("\"bits\": 7") != std::string::npos) std::abort();
  return 0;
}
