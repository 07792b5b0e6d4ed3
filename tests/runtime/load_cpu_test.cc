// Loading CPU programs: sealed memory, what is refused before dlopen, and that
// equal descriptor numbers never mix programs up.

#include "runtime/load_cpu.h"

#include <elf.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>

#include "runtime/cpu_program.h"
#include "runtime/kiln.h"
#include "tests/support/golden.h"
#include "tests/support/tiny_bundle.h"

namespace kiln {
namespace {

using ::kiln::testing::OpenTiny;
using ::kiln::testing::ReadTestFile;
using ::kiln::testing::TinyCpuSection;
using ::kiln::testing::TinyKernelBinary;
using ::testing::HasSubstr;

class LoadCpuTest : public ::testing::Test {
 protected:
  LoadCpuTest() {
    options_.struct_size = sizeof(options_);
    options_.cpu_threads = 2;
  }

  kiln_status_t Load(BundleSection section) {
    kiln_bundle_t* bundle = OpenTiny({std::move(section)});
    kiln_modules_t* modules = nullptr;
    const kiln_status_t status =
        kiln_modules_load(bundle, &options_, &modules, &error_);
    EXPECT_EQ(status == KILN_STATUS_OK, modules != nullptr);
    if (modules != nullptr) {
      info_.struct_size = sizeof(info_);
      EXPECT_EQ(kiln_modules_info(modules, &info_, nullptr), KILN_STATUS_OK);
    }
    kiln_modules_unload(modules, nullptr);
    kiln_bundle_close(bundle, nullptr);
    return status;
  }

  static int OpenDescriptors() {
    int count = 0;
    for (const auto& entry :
         std::filesystem::directory_iterator("/proc/self/fd")) {
      static_cast<void>(entry);
      ++count;
    }
    return count;
  }

  static int MappedPrograms() {
    std::ifstream maps("/proc/self/maps");
    int count = 0;
    for (std::string line; std::getline(maps, line);) {
      if (line.find("kiln-program") != std::string::npos) ++count;
    }
    return count;
  }

  kiln_load_options_t options_ = {};
  kiln_modules_info_t info_ = {};
  kiln_error_t error_ = {};
};

TEST_F(LoadCpuTest, LoadsAndUnloadsWithoutLeftovers) {
  const std::string binary = TinyKernelBinary();
  ASSERT_EQ(Load(TinyCpuSection(binary)), KILN_STATUS_OK) << error_.message;
  EXPECT_EQ(info_.backend, uint32_t{KILN_BACKEND_CPU});
  EXPECT_EQ(info_.cpu_threads, 2u);
  const int descriptors = OpenDescriptors();
  for (int i = 0; i < 50; ++i) {
    ASSERT_EQ(Load(TinyCpuSection(binary)), KILN_STATUS_OK) << error_.message;
  }
  EXPECT_EQ(OpenDescriptors(), descriptors);
  EXPECT_EQ(MappedPrograms(), 0);
}

TEST_F(LoadCpuTest, UsesEveryProcessorOfTheMaskByDefault) {
  options_.cpu_threads = 0;
  ASSERT_EQ(Load(TinyCpuSection(TinyKernelBinary())), KILN_STATUS_OK);
  EXPECT_EQ(info_.cpu_threads, runtime::AvailableProcessors());
}

TEST_F(LoadCpuTest, TwoProgramsOfOneNumberStayApart) {
  // The second memory file gets the descriptor number of the first.
  const std::string binary = TinyKernelBinary();
  void* first = nullptr;
  void* second = nullptr;
  ASSERT_EQ(
      runtime::LoadCpuProgram(binary.data(), binary.size(), &first, &error_),
      KILN_STATUS_OK);
  ASSERT_EQ(
      runtime::LoadCpuProgram(binary.data(), binary.size(), &second, &error_),
      KILN_STATUS_OK);
  EXPECT_NE(first, second);
  runtime::CpuKernel a = nullptr;
  runtime::CpuKernel b = nullptr;
  ASSERT_EQ(runtime::FindCpuKernel(first, "square", 24, &a, &error_),
            KILN_STATUS_OK);
  ASSERT_EQ(runtime::FindCpuKernel(second, "square", 24, &b, &error_),
            KILN_STATUS_OK);
  EXPECT_NE(a, b);
  runtime::UnloadCpuProgram(first);
  runtime::UnloadCpuProgram(second);
}

TEST_F(LoadCpuTest, RefusesAMissingKernel) {
  BundleSection section = TinyCpuSection(TinyKernelBinary());
  auto program = std::make_shared<Program>(*section.programs[0]);
  for (Kernel& kernel : program->kernels) {
    if (kernel.entry == "sum") kernel.entry = "sunk";
  }
  section.programs = {program};
  for (Plan& plan : section.entries[0].plans) {
    plan.body.steps[1].entry = "sunk";
  }
  EXPECT_EQ(Load(section), KILN_STATUS_KERNEL_MISSING);
  EXPECT_STREQ(error_.message, "program does not export 'sunk'");
}

TEST_F(LoadCpuTest, RefusesAnotherArgumentSize) {
  BundleSection section = TinyCpuSection(TinyKernelBinary());
  auto program = std::make_shared<Program>(*section.programs[0]);
  ASSERT_EQ(program->kernels[1].entry, "count");
  program->kernels[1].params[0].bytes = 24;
  program->kernels[1].param_bytes = 24;
  section.programs = {program};
  EXPECT_EQ(Load(section), KILN_STATUS_PARAMETER_LAYOUT);
  EXPECT_STREQ(error_.message,
               "kernel 'count' takes 16 bytes of arguments, bundle declares "
               "24");
}

TEST_F(LoadCpuTest, RefusesAnObjectThatWouldRunOnLoad) {
  EXPECT_EQ(Load(TinyCpuSection(ReadTestFile(KILN_RUDE_KERNEL))),
            KILN_STATUS_PROGRAM_REFUSED);
  EXPECT_THAT(error_.message, HasSubstr("initialiser"));
}

TEST_F(LoadCpuTest, RefusesAnObjectThatNeedsALibrary) {
  // This very test: a position-independent executable.
  const std::string self = ReadTestFile("/proc/self/exe");
  EXPECT_NE(runtime::CheckCpuObject(self.data(), self.size()), nullptr);
}

TEST_F(LoadCpuTest, RefusesWhatIsNotASharedObject) {
  EXPECT_EQ(Load(TinyCpuSection("not ELF")), KILN_STATUS_PROGRAM_REFUSED);
  EXPECT_THAT(error_.message, HasSubstr("is not an ELF file"));
  std::string binary = TinyKernelBinary();
  reinterpret_cast<Elf64_Ehdr*>(binary.data())->e_machine = EM_AARCH64;
  EXPECT_EQ(Load(TinyCpuSection(binary)), KILN_STATUS_PROGRAM_REFUSED);
  EXPECT_THAT(error_.message, HasSubstr("not a shared object for x86-64"));
}

TEST_F(LoadCpuTest, ObjectCheckReadsOnlyWhatItWasGiven) {
  // Under the address sanitizer an overrun ends the test.
  const std::string binary = TinyKernelBinary();
  ASSERT_EQ(runtime::CheckCpuObject(binary.data(), binary.size()), nullptr);
  for (size_t n = 0; n < binary.size(); n += n < 512 ? 1 : 61) {
    const std::vector<char> cut(binary.begin(),
                                binary.begin() + static_cast<ptrdiff_t>(n));
    runtime::CheckCpuObject(cut.data(), cut.size());
  }
  std::mt19937 random(3);
  for (int round = 0; round < 20000; ++round) {
    std::vector<char> changed(binary.begin(), binary.end());
    for (int i = 0; i < 4; ++i) {
      const size_t within = i % 2 == 0 ? 512 : changed.size();
      changed[random() % std::min(within, changed.size())] =
          static_cast<char>(random());
    }
    runtime::CheckCpuObject(changed.data(), changed.size());
  }
}

}  // namespace
}  // namespace kiln
