// The getters of kiln.h give back what the writer was given.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "runtime/kiln.h"
#include "tests/support/tiny_bundle.h"

namespace kiln {
namespace {

using ::kiln::testing::OpenTiny;
using ::kiln::testing::TinyCpuSection;
using ::kiln::testing::TinyCudaSection;
using ::testing::HasSubstr;

template <typename T>
T Info() {
  T info = {};
  info.struct_size = sizeof(info);
  return info;
}

class InspectTest : public ::testing::Test {
 protected:
  InspectTest() {
    bundle_ = OpenTiny({TinyCudaSection(), TinyCpuSection("not really ELF")});
  }

  ~InspectTest() override { kiln_bundle_close(bundle_, nullptr); }

  kiln_bundle_t* bundle_;
  kiln_error_t error_ = {};
};

// Section 1 is sm_90a, its entry 1 is "moe".
TEST_F(InspectTest, SectionsAreSortedByTarget) {
  auto info = Info<kiln_section_info_t>();
  ASSERT_EQ(kiln_bundle_section(bundle_, 0, &info, &error_), KILN_STATUS_OK);
  EXPECT_STREQ(info.target, "cpu-x86-64-v2");
  EXPECT_EQ(info.backend, uint32_t{KILN_BACKEND_CPU});
  EXPECT_EQ(info.driver_version_min, 0u);
  ASSERT_EQ(kiln_bundle_section(bundle_, 1, &info, &error_), KILN_STATUS_OK);
  EXPECT_STREQ(info.target, "sm_90a");
  EXPECT_EQ(info.backend, uint32_t{KILN_BACKEND_CUDA});
  EXPECT_EQ(info.level, 90u);
  EXPECT_EQ(info.arch_specific, 1u);
  EXPECT_EQ(info.driver_version_min, 12040u);
  EXPECT_EQ(info.entry_count, 2u);
  EXPECT_EQ(info.program_count, 2u);
  EXPECT_EQ(info.flags, 0u);
}

TEST_F(InspectTest, EntriesAndTheirGeometry) {
  auto info = Info<kiln_entry_info_t>();
  ASSERT_EQ(kiln_bundle_entry(bundle_, 1, 1, &info, &error_), KILN_STATUS_OK);
  EXPECT_STREQ(info.name, "moe");
  EXPECT_STREQ(info.op, "fused_moe");
  EXPECT_THAT(info.geometry, HasSubstr("H256 I128 E4 k2"));
  EXPECT_EQ(info.capacity, 64u);
  EXPECT_EQ(info.plan_count, 3u);
  const char* name = nullptr;
  const char* value = nullptr;
  ASSERT_EQ(kiln_bundle_attribute(bundle_, 1, 1, 1, &name, &value, &error_),
            KILN_STATUS_OK);
  EXPECT_STREQ(name, "hidden");
  EXPECT_STREQ(value, "256");
}

TEST_F(InspectTest, PlansAndTheirParts) {
  auto plan = Info<kiln_plan_info_t>();
  ASSERT_EQ(kiln_bundle_plan(bundle_, 1, 1, 2, &plan, &error_), KILN_STATUS_OK);
  EXPECT_EQ(plan.m_min, 5u);
  EXPECT_EQ(plan.m_max, 64u);
  EXPECT_STREQ(plan.label, "fused_moe.cuda{tile=4}");
  EXPECT_STREQ(plan.template_name, "fused_moe.cuda");
  EXPECT_STREQ(plan.numerics_class, "f16-split1");
  EXPECT_EQ(plan.median_ns, 1250.5);
  EXPECT_EQ(plan.noise_floor, 0.004);
  EXPECT_EQ(plan.samples, 96u);
  EXPECT_EQ(plan.arena_bytes, 4096u + 1024u);
  EXPECT_EQ(plan.deterministic, 1u);
  EXPECT_EQ(plan.overlapped, 0u);

  auto param = Info<kiln_param_info_t>();
  ASSERT_EQ(kiln_bundle_param(bundle_, 1, 1, 2, 1, &param, &error_),
            KILN_STATUS_OK);
  EXPECT_STREQ(param.name, "out");
  EXPECT_STREQ(param.dtype, "f32");
  EXPECT_STREQ(param.shape, "[m, H]");
  EXPECT_EQ(param.output, 1u);
  EXPECT_EQ(param.offset, 8u);

  auto slice = Info<kiln_slice_info_t>();
  ASSERT_EQ(kiln_bundle_slice(bundle_, 1, 1, 2, 1, &slice, &error_),
            KILN_STATUS_OK);
  EXPECT_STREQ(slice.name, "routes");
  EXPECT_EQ(slice.offset, 4096u);
  EXPECT_EQ(slice.bytes, 1024u);
}

TEST_F(InspectTest, StepsKernelsAndPrograms) {
  auto step = Info<kiln_step_info_t>();
  ASSERT_EQ(kiln_bundle_step(bundle_, 1, 1, 0, 1, &step, &error_),
            KILN_STATUS_OK);
  EXPECT_STREQ(step.label, "fc2");
  EXPECT_STREQ(step.kernel_name, "fc2");
  EXPECT_EQ(step.grid[0].mul[0], 1u);
  EXPECT_EQ(step.grid[0].add[1], 32u);
  EXPECT_EQ(step.block[1], 4u);
  EXPECT_EQ(step.arg_count, 4u);

  auto arg = Info<kiln_arg_info_t>();
  ASSERT_EQ(kiln_bundle_arg(bundle_, 1, 1, 0, 1, 3, &arg, &error_),
            KILN_STATUS_OK);
  EXPECT_EQ(arg.kind, uint32_t{KILN_ARG_U64});
  EXPECT_EQ(arg.offset, 24u);
  EXPECT_EQ(arg.bytes, 8u);
  EXPECT_EQ(arg.value, 0x1122334455667788u);

  auto kernel = Info<kiln_kernel_info_t>();
  ASSERT_EQ(kiln_bundle_kernel(bundle_, 1, step.program, step.kernel, &kernel,
                               &error_),
            KILN_STATUS_OK);
  EXPECT_STREQ(kernel.name, "fc2");
  EXPECT_EQ(kernel.param_bytes, 32u);
  EXPECT_EQ(kernel.registers, 40u);
  uint32_t offset = 0;
  uint32_t bytes = 0;
  ASSERT_EQ(kiln_bundle_kernel_param(bundle_, 1, step.program, step.kernel, 1,
                                     &offset, &bytes, &error_),
            KILN_STATUS_OK);
  EXPECT_EQ(offset, 8u);
  EXPECT_EQ(bytes, 4u);

  auto program = Info<kiln_program_info_t>();
  ASSERT_EQ(kiln_bundle_program(bundle_, 1, step.program, &program, &error_),
            KILN_STATUS_OK);
  EXPECT_STREQ(program.toolchain, "nvrtc 13.0.88");
  EXPECT_EQ(program.file_offset % 64, 0u);
  EXPECT_EQ(std::memcmp(program.data, "fc2 ", 4), 0);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(program.data) % 64, 0u);
}

// An engine that was built with the header of ABI 1.0 or 1.1.
TEST_F(InspectTest, ThePlanOfAnEarlierHeaderIsFilledAndNoMore) {
  BundleSection section = TinyCudaSection();
  section.entries[0].plans[2].body.overlapped = true;
  kiln_bundle_t* bundle = OpenTiny({section});
  auto plan = Info<kiln_plan_info_t>();
  ASSERT_EQ(kiln_bundle_plan(bundle, 0, 1, 2, &plan, &error_), KILN_STATUS_OK);
  EXPECT_EQ(plan.overlapped, 1u);
  EXPECT_EQ(plan.reserved, 0u);
  kiln_plan_info_t early = {};
  early.struct_size = 120;
  early.overlapped = early.reserved = 0xabababab;
  ASSERT_EQ(kiln_bundle_plan(bundle, 0, 1, 2, &early, &error_), KILN_STATUS_OK);
  EXPECT_EQ(early.struct_size, 120u);
  EXPECT_EQ(early.candidates, plan.candidates);
  EXPECT_EQ(early.overlapped, 0xababababu);
  EXPECT_EQ(early.reserved, 0xababababu);
  early.struct_size = 124;
  EXPECT_EQ(kiln_bundle_plan(bundle, 0, 1, 2, &early, &error_),
            KILN_STATUS_STRUCT_SIZE);
  kiln_bundle_close(bundle, nullptr);
}

TEST_F(InspectTest, IndicesOutOfRangeAreRefusedAndChangeNothing) {
  auto plan = Info<kiln_plan_info_t>();
  EXPECT_EQ(kiln_bundle_plan(bundle_, 1, 1, 3, &plan, &error_),
            KILN_STATUS_INVALID_ARGUMENT);
  EXPECT_STREQ(error_.message, "plan index 3 of 3");
  EXPECT_EQ(plan.label, nullptr);
  EXPECT_EQ(kiln_bundle_plan(bundle_, 2, 0, 0, &plan, &error_),
            KILN_STATUS_INVALID_ARGUMENT);
  EXPECT_STREQ(error_.message, "section index 2 of 2");
  EXPECT_EQ(kiln_bundle_plan(bundle_, 0, 0xffffffff, 0, &plan, &error_),
            KILN_STATUS_INVALID_ARGUMENT);
  EXPECT_STREQ(error_.message, "entry index 4294967295 of 1");
}

}  // namespace
}  // namespace kiln
