#include "tests/tuner/mutants/rules.h"

namespace kiln::testing {
namespace {

constexpr char kCuda[] = "fused_moe/cuda.cu";
constexpr char kFragment[] = "device/fragment.h";
constexpr char kTrellis[] = "device/trellis.h";
constexpr char kHadamard[] = "device/hadamard.h";
constexpr char kActivation[] = "device/activation.h";

constexpr char kBound[] = "off by one in a bound";
constexpr char kIndex[] = "off by one in an index";
constexpr char kBarrier[] = "missing barrier";
constexpr char kTail[] = "skipped tail";
constexpr char kStale[] = "stale arena";
constexpr char kReadOut[] = "out-of-bounds read";
constexpr char kWriteOut[] = "out-of-bounds write";
constexpr char kRounding[] = "wrong rounding";
constexpr char kSwap[] = "gate and up swapped";
constexpr char kDropped[] = "dropped route";
constexpr char kStride[] = "wrong stride";
constexpr char kRace[] = "race";
constexpr char kSign[] = "flipped sign";
constexpr char kScale[] = "wrong scale vector";
constexpr char kRotation[] = "wrong Hadamard";
constexpr char kCodebook[] = "wrong codebook";
constexpr char kExpert[] = "wrong expert";
constexpr char kOrder[] = "wrong order";
constexpr char kNan[] = "swallowed NaN";
constexpr char kInput[] = "written input";
constexpr char kActivate[] = "wrong activation";

constexpr MutationRule kRules[] = {
    // Barriers and the copy pipeline: only a device shows these.
    {kBarrier, kCuda, "RouteBlock", "counts[e] = 0;\n  __syncthreads();",
     "counts[e] = 0;\n  "},
    {kBarrier, kCuda, "", "__syncthreads();", ""},
    {kBarrier, kCuda, "Multiply", "WaitCopies<kStages - 2>();", ""},
    {kBarrier, kCuda, "Multiply", "WaitCopies<kStages - 2>();",
     "WaitCopies<kStages - 1>();"},
    {kBarrier, kCuda, "Multiply", "CommitCopies();", ""},
    {kBarrier, kCuda, "Multiply", "slot - 1;", "slot;"},
    {kBarrier, kCuda, "Multiply", "stage + kStages - 1, to",
     "stage + kStages, to"},
    {kRace, kCuda, "RouteBlock", "atomicAdd(&counts[found], 1u);",
     "counts[found] = counts[found] + 1;"},
    {kRace, kCuda, "RouteBlock", "if (lane == 0) warp_matches[warp] = matches;",
     "if (lane == 0) warp_matches[0] = matches;"},
    {kRace, kCuda, "RouteBlock", "expert == kExperts - 1 && threadIdx.x == 0",
     "threadIdx.x == 0"},
    {kRace, kCuda, "StoreSums", "at[i * 16] = sums[i][g][odd];",
     "at[i * 16] += sums[i][g][odd];"},
    {kRace, kCuda, "StoreSums", "(total * blockIdx.y + first", "(first"},
    {kRace, kCuda, "RouteBlock", "positions[route] = at;",
     "positions[route] = at;\n      if (at > 0) rows[at - 1] = row;"},
    {kBound, kCuda, "RouteBlock", " < ", " <= "},
    {kBound, kCuda, "kiln_moe_route", " < ", " <= "},
    {kBound, kCuda, "kiln_moe_rotate", " >= ", " > "},
    {kBound, kCuda, "kiln_moe_activate", " >= ", " > "},
    {kBound, kCuda, "kiln_moe_combine", " >= ", " > "},
    {kBound, kCuda, "kiln_moe_combine", "lane < kTopK", "lane + 1 < kTopK"},
    {kBound, kCuda, "kiln_moe_fc1", " >= ", " > "},
    {kBound, kCuda, "kiln_moe_fc2", " >= ", " > "},
    {kBound, kCuda, "kiln_moe_fc1", "row < tile.rows", "row <= tile.rows"},
    {kBound, kCuda, "kiln_moe_fc2", "row < tile.rows", "row <= tile.rows"},
    {kBound, kCuda, "StoreSums", " < rows", " <= rows"},
    {kBound, kCuda, "StoreSums", " < rows", " + 1 < rows"},
    {kBound, kCuda, "StoreSums", " >= rows", " + 8 >= rows"},
    {kBound, kCuda, "ComputeStage", ">= rows", "+ 16 >= rows"},
    {kBound, kCuda, "LoadProducts", " < slices", " + 1 < slices"},
    {kBound, kCuda, "Multiply", "stage < end", "stage + 1 < end"},
    {kBound, kCuda, "Multiply", "+ kStages - 1 < end", "+ kStages < end"},
    {kIndex, kCuda, "RouteBlock", "(1u << lane) - 1", "(2u << lane) - 1"},
    {kIndex, kCuda, "RouteBlock", "tokens_tile - 1", "tokens_tile"},
    {kIndex, kCuda, "RouteBlock", "first_tile + i", "first_tile + i + 1"},
    {kIndex, kCuda, "RouteBlock", "lane < warp ?", "lane <= warp ?"},
    {kIndex, kCuda, "RouteBlock", "first + i * tokens_tile",
     "first + i * tokens_tile + 1"},
    {kIndex, kCuda, "Multiply", "(blockIdx.y + 1)", "blockIdx.y"},
    {kIndex, kCuda, "ComputeStage", "lane / 16 * 8", "lane / 16 * 4"},
    {kIndex, kCuda, "ComputeStage", "lane / 8 % 2", "lane / 8"},
    {kIndex, kCuda, "ComputeStage", "step % 2 * 2 + 1", "step % 2 * 2"},
    {kTail, kCuda, "RouteBlock", "left < tokens_tile ? left : tokens_tile",
     "left < tokens_tile ? left - 1 : tokens_tile"},
    {kTail, kCuda, "RouteBlock",
     "begin + range < routes ? begin + range : "
     "routes",
     "begin + range < routes ? begin + range : begin"},
    {kTail, kCuda, "RouteBlock", "(count + tokens_tile - 1) / tokens_tile",
     "count / tokens_tile"},
    {kTail, kCuda, "LoadProducts", "s += kAhead", "s += 2 * kAhead"},
    {kTail, kCuda, "kiln_moe_combine", "base += kCombined",
     "base += 2 * kCombined"},
    {kStale, kCuda, "RouteBlock", "positions[route] = kNone;", ""},
    {kStale, kCuda, "RouteBlock", "positions[route] = at;", ""},
    {kStale, kCuda, "RouteBlock", "rows[at] = row;", ""},
    {kStale, kCuda, "RouteBlock", "*totals = sum;", ""},
    {kStale, kCuda, "RouteBlock", "tiles[first_tile + i] = tile;", ""},
    {kStale, kCuda, "RouteBlock", "counts[e] = 0;", ""},
    {kStale, kCuda, "Rotate", "Store4(up_operand + to * kHidden + column, up);",
     ""},
    {kStale, kCuda, "kiln_moe_activate",
     "Store4(activated + at * kInter + column, value);", ""},
    {kStale, kCuda, "StoreSums", "at[i * 16 + 8] = sums[i][g][odd + 2];", ""},
    {kStale, kCuda, "StoreSums", "*reinterpret_cast<u32*>(at + 8) = high;", ""},
    {kStale, kCuda, "kiln_moe_combine",
     "float sum[4] = {0.0f, 0.0f, 0.0f, "
     "0.0f};",
     "float sum[4];\n  for (u32 i = 0; i < 4; ++i) {\n"
     "    sum[i] = out[static_cast<u64>(token) * kHidden + column + i];\n  }"},
    {kReadOut, kCuda, "CopyOperand", "copy ? source[i] : 0",
     "copy ? source[i] + 1 : 0"},
    {kReadOut, kCuda, "kiln_moe_combine", "weights[route]",
     "weights[route + 1]"},
    {kReadOut, kCuda, "RouteBlock", "ids[route]", "ids[route + 1]"},
    {kReadOut, kCuda, "LoadRotation", "x + token * kHidden",
     "x + (token + 1) * kHidden"},
    {kReadOut, kCuda, "CopyOperand", "const bool copy = source[i] != kNone;",
     "const bool copy = true;"},
    {kWriteOut, kCuda, "RouteBlock", "*totals = sum;",
     "*totals = sum;\n    totals[1] = sum;"},
    {kWriteOut, kCuda, "RouteBlock", "positions[route] = at;",
     "positions[route] = at;\n      positions[routes] = at;"},
    {kWriteOut, kCuda, "kiln_moe_combine",
     "make_float4(sum[0], sum[1], sum[2], sum[3]);",
     "make_float4(sum[0], sum[1], sum[2], sum[3]);\n"
     "  out[static_cast<u64>(tokens) * kHidden] = 0;"},
    {kWriteOut, kCuda, "kiln_moe_combine",
     "make_float4(sum[0], sum[1], sum[2], sum[3]);",
     "make_float4(sum[0], sum[1], sum[2], sum[3]);\n"
     "  if (token == 0 && column == 0) out[-1] = 0;"},
    {kWriteOut, kCuda, "kiln_moe_activate",
     "Store4(activated + at * kInter + column, value);",
     "Store4(activated + at * kInter + column, value);\n"
     "  if (at + 1 == totals->rows && column + 4 == kInter) {\n"
     "    Store4(activated + (at + 1) * kInter, value);\n  }"},
    {kRounding, kCuda, "Rotate",
     "kd::f16_to_f32(kd::f32_to_f16(value[i] * "
     "gate[i]))",
     "value[i] * gate[i]"},
    {kRounding, kCuda, "Rotate",
     "kd::f16_to_f32(kd::f32_to_f16(value[i] * "
     "up[i]))",
     "value[i] * up[i]"},
    {kRounding, kCuda, "LoadProducts",
     "Unpack4(make_uint2(Pack2(v[i][0], v[i][1]), Pack2(v[i][2], v[i][3])), "
     "v[i]);",
     ""},
    {kRounding, kCuda, "Store4", "Pack2(v[0], v[1])",
     "Pack2(v[0], v[1]) & 0xFFFEFFFEu"},
    {kRounding, kCuda, "StoreSums", "RoundPair(d[0], d[1])",
     "(RoundPair(d[0], d[1]) & 0xFFFEFFFEu)"},
    {kRounding, kCuda, "StoreSums", "RoundPair(d[0], d[1])",
     "RoundPair(d[0] * 0.9998f, d[1] * 0.9998f)"},
    {kRounding, kCuda, "StoreSums", "RoundPair(d[2], d[3])",
     "RoundPair(d[2] * 1.0003f, d[3] * 1.0003f)"},
    {kRounding, kCuda, "kiln_moe_activate",
     "const float g = gate[i] * "
     "gate_svh[i];",
     "const float g = kd::round_f16(gate[i] * gate_svh[i]);"},
    {kRounding, kCuda, "kiln_moe_activate", "kd::Silu(g) * u * down_suh[i]",
     "kd::round_f16(kd::Silu(g) * u) * "
     "down_suh[i]"},
    {kRounding, kCuda, "kiln_moe_activate", "kd::Silu(g) * u * down_suh[i]",
     "kd::round_f16(kd::Silu(g)) * u * "
     "down_suh[i]"},
    {kRounding, kCuda, "kiln_moe_combine",
     "kd::Fma(weight, value[j][i] * svh[i], sum[i])",
     "kd::round_f16(kd::Fma(weight, value[j][i] * svh[i], sum[i]))"},
    {kRounding, kCuda, "kiln_moe_combine",
     "kd::Fma(weight, value[j][i] * svh[i], sum[i])",
     "kd::Fma(weight, kd::round_f16(value[j][i] * svh[i]), sum[i])"},
    {kSwap, kCuda, "kiln_moe_fc1", "is_up ? up_operand : gate_operand",
     "is_up ? gate_operand : up_operand"},
    {kSwap, kCuda, "kiln_moe_fc1", "is_up ? w_up : w_gate",
     "is_up ? w_gate : w_up"},
    {kSwap, kCuda, "kiln_moe_fc1", "column >= kInter", "column < kInter"},
    {kSwap, kCuda, "LoadRotation", "gate_suh + scale", "up_suh + scale"},
    {kSwap, kCuda, "kiln_moe_activate", "(&gate)[4] = both[0]",
     "(&gate)[4] = both[1]"},
    {kSwap, kCuda, "kiln_moe_activate", "kd::Silu(g) * u", "kd::Silu(u) * g"},
    {kSwap, kCuda, "Rotate",
     "Store4(gate_operand + to * kHidden + column, "
     "gate);",
     "Store4(gate_operand + to * kHidden + column, up);"},
    {kDropped, kCuda, "ExpertOf", "id >= 0", "id > 0"},
    {kDropped, kCuda, "ExpertOf", "static_cast<RouteId>(kExperts)",
     "static_cast<RouteId>(kExperts - 1)"},
    {kDropped, kCuda, "ExpertOf",
     "return id >= 0 && id < static_cast<RouteId>(kExperts)",
     "return static_cast<int>(id) >= 0 && static_cast<int>(id) < "
     "static_cast<int>(kExperts)"},
    {kDropped, kCuda, "kiln_moe_combine", "base + j < kTopK",
     "base + j + 1 < kTopK"},
    {kDropped, kCuda, "kiln_moe_combine", "if (places[j] == kAbsent) continue;",
     "if (places[j] == kAbsent) break;"},
    {kDropped, kCuda, "kiln_moe_combine", "if (places[j] == kAbsent) continue;",
     "if (places[j] == kAbsent || weight < 0) continue;"},
    {kStride, kCuda, "kiln_moe_rotate", "/ kTopK", "/ (kTopK + 1)"},
    {kStride, kCuda, "kiln_moe_fc1", "/ kTopK", "/ (kTopK + 1)"},
    {kStride, kCuda, "kiln_moe_activate", "* (2 * kInter)", "* kInter"},
    {kStride, kCuda, "kiln_moe_activate", "* (3 * kInter)", "* (2 * kInter)"},
    {kStride, kCuda, "kiln_moe_activate", "(kTopK * 2 * kInter)",
     "(kTopK * kInter)"},
    {kStride, kCuda, "kiln_moe_combine", "* kHidden", "* kInter"},
    {kStride, kCuda, "ExpertTiles", "column * (2 * kBits)", "column * kBits"},
    {kStride, kCuda, "CopyWeights", "kWidth) * 2 * kBits",
     "kWidth - 16) * 2 * kBits"},
    {kStride, kCuda, "CopyOperand", "kRowsAtOnce * kRowHalves",
     "kRowsAtOnce * kDepthTile"},
    {kStride, kCuda, "ComputeStage", "token * kRowHalves",
     "token * kDepthTile"},
    {kStride, kCuda, "StoreSums", "* kWidth", "* (kWidth - 16)"},
    {kSign, kCuda, "kiln_moe_combine", "kd::Fma(weight,", "kd::Fma(-weight,"},
    {kSign, kCuda, "kiln_moe_activate", "kd::Silu(g)", "-kd::Silu(g)"},
    {kSign, kHadamard, "WarpHadamard128Unscaled", "-1.0f : 1.0f",
     "1.0f : -1.0f"},
    {kSign, kHadamard, "Hadamard4", "v[2] - v[3]", "v[3] - v[2]"},
    {kScale, kCuda, "kiln_moe_activate", "Load4(table, gate_svh)",
     "Load4(table + kInter, gate_svh)"},
    {kScale, kCuda, "kiln_moe_activate", "Load4(table + 2 * kInter, down_suh)",
     "Load4(table + kInter, down_suh)"},
    {kScale, kCuda, "kiln_moe_combine",
     "static_cast<u64>(expert) * kHidden + column", "column"},
    {kScale, kCuda, "LoadRotation", "table * kHidden + column", "column"},
    {kScale, kCuda, "kiln_moe_combine", "value[j][i] * svh[i]",
     "value[j][i] * svh[0]"},
    {kRotation, kCuda, "", "kd::WarpHadamard128(up, lane);", ""},
    {kRotation, kCuda, "kiln_moe_activate", "kd::WarpHadamard128(value, lane);",
     ""},
    {kRotation, kHadamard, "WarpHadamard128Unscaled", "mask < 32", "mask < 16"},
    {kRotation, kHadamard, "WarpHadamard128Unscaled", "mask = 1;", "mask = 2;"},
    {kRotation, kHadamard, "Hadamard4", "d0 + d1", "d0 - d1"},
    {kRotation, kHadamard, "", "0x3DB504F3u", "0x3DB50AF3u"},
    {kCodebook, kTrellis, "", "0xCBAC1FEDu", "0xCBAC1FEFu"},
    {kCodebook, kTrellis, "", "89226354u", "89226355u"},
    {kCodebook, kTrellis, "", "64248484u", "64252580u"},
    {kCodebook, kTrellis, "", "0x83DCD12Du", "0x83DCD12Eu"},
    {kCodebook, kTrellis, "", "0x8FFF8FFFu", "0x8FFE8FFFu"},
    {kCodebook, kTrellis, "", "0x3B603B60u", "0x3B603B61u"},
    {kCodebook, kTrellis, "", "kMul1Scale = 0x1EEE", "kMul1Scale = 0x1EEF"},
    {kCodebook, kTrellis, "", "0xC931", "0xC930"},
    {kCodebook, kFragment, "FindLaneSpan", "8u * K * (lane + 1)",
     "8u * K * lane + 8u"},
    {kCodebook, kFragment, "SpanState", "(7 - kIndex)", "(7 - kIndex / 2)"},
    {kCodebook, kFragment, "DecodeFragment", "HashValues<CB>(x[4], x[5])",
     "HashValues<CB>(x[5], x[4])"},
    {kCodebook, kFragment, "DecodeFragment", "HashValues<CB>(x[2], x[3])",
     "HashValues<CB>(x[6], x[7])"},
    {kCodebook, kFragment, "LoadSpan", "w1 >> span.shift", "w1"},
    {kExpert, kCuda, "ExpertTiles", "expert * kExpertBytes",
     "(expert ^ 1) * kExpertBytes"},
    {kExpert, kCuda, "RouteBlock", "tile.expert = expert;",
     "tile.expert = kExperts - 1 - expert;"},
    {kExpert, kCuda, "RouteBlock", "row.expert = expert;",
     "row.expert = expert == 0 ? 0 : expert - 1;"},
    {kOrder, kCuda, "RouteBlock", "row.route = route;",
     "row.route = route ^ 1;"},
    {kOrder, kCuda, "kiln_moe_combine", "own_weight, (base + j) % 32",
     "own_weight, (base + j + 1) % kTopK"},
    {kOrder, kCuda, "ComputeStage", "Mma(sums[i][g + 1], a[i], b[2], b[3])",
     "Mma(sums[i][g + 1], a[i], b[3], b[2])"},
    {kOrder, kCuda, "StoreSums", "sums[i][g][odd + 2]", "sums[i][g][3 - odd]"},
    {kNan, kCuda, "kiln_moe_activate",
     "value[i] = kd::Silu(g) * u * "
     "down_suh[i];",
     "value[i] = fmaxf(kd::Silu(g) * u * down_suh[i], "
     "-60000.0f);"},
    {kNan, kCuda, "kiln_moe_combine",
     "sum[i] = kd::Fma(weight, value[j][i] * "
     "svh[i], sum[i]);",
     "sum[i] = kd::Fma(weight, fminf(value[j][i], 1e30f) * "
     "svh[i], sum[i]);"},
    {kInput, kCuda, "kiln_moe_combine", "own_weight = weights[route];",
     "own_weight = weights[route];\n"
     "    if (column == 0) const_cast<float*>(weights)[route] = 0.5f;"},
    {kInput, kCuda, "kiln_moe_rotate", "const Row row = rows[at];",
     "const Row row = rows[at];\n"
     "  if (at == 0 && column == 0) const_cast<u16*>(up_suh)[1] ^= 1;"},
    {kActivate, kCuda, "kiln_moe_activate", "kd::Silu(g) * u", "g * u"},
    {kActivate, kCuda, "kiln_moe_activate", "kd::Silu(g) * u",
     "fmaxf(g, 0.0f) * u"},
    {kActivate, kActivation, "Sigmoid", "Exp(-v)", "Exp(v)"},
    {kActivate, kActivation, "Sigmoid", "1.0f + Exp", "1.003f + Exp"},
};

constexpr Excuse kExcuses[] = {
    {kCuda, "RouteBlock", " < ", "", "base < end; base += 32",
     "one more turn, in which no route is below the end"},
    {kCuda, "RouteBlock", " < ", "", "const u32 begin = ",
     "the smaller of two numbers, whichever is named when they are equal"},
    {kCuda, "RouteBlock", " < ", "", "const u32 end = ",
     "the smaller of two numbers, whichever is named when they are equal"},
    {kCuda, "RouteBlock", " < ", "", "tile.rows = left < tokens_tile",
     "the smaller of two numbers, whichever is named when they are equal"},
    {kCuda, "RouteBlock", " < ", "", "e < kExperts; e += kRouteThreads",
     "clears one more word of shared memory, before anything is in it"},
    {kCuda, "kiln_moe_route", " < ", "", "i < kWarpRotations",
     "one of the two loads an input that nothing uses, the other is caught"},
    {kCuda, "kiln_moe_route", " < ", "", "if (item < items)",
     "one of the two reads a token behind the last and drops it, the other is "
     "caught; compute-sanitizer sees the read"},
    {kCuda, "kiln_moe_fc2", "row < tile.rows", "", "",
     "computes one more row, from whatever is there, and does not store it"},
    {kCuda, "kiln_moe_combine", "base += kCombined", "", "",
     "the loop has a second turn only for more than 8 routes of a token"},
    {kCuda, "kiln_moe_activate", "value[i] = kd::Silu(g) * u * down_suh[i];",
     "", "",
     "a block of -60000 is transformed into an infinity of binary16, and the "
     "row is NaN as it must be"},
    {kCuda, "RouteBlock", "counts[e] = 0;\n  __syncthreads();", "", "",
     "a race that the device does not lose: a count follows the load of an id, "
     "which takes longer than the clear"},
    {kCuda, "RouteBlock", " < ", "", "i < own_tiles",
     "a race that the device does not lose: the next expert's block writes the "
     "same tile later, because it counts one expert more"},
};

}  // namespace

std::span<const MutationRule> CudaMutationRules() { return kRules; }

std::span<const Excuse> CudaExcuses() { return kExcuses; }

}  // namespace kiln::testing
