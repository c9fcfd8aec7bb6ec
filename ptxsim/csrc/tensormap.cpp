// ptxsim: decodes the 128-byte tensor map (TMA descriptor) of sm_90.
//
// How the layout was found.  The host code that CuTe DSL 4.8 compiles writes the descriptor itself.
// Its bytes were captured for kernels with TMA atoms over every element type, ranks 1 to 5, dims,
// strides, boxes, swizzles, loads, stores and reductions, and compared with the arguments; the
// fields the DSL never varies (interleave, fill mode, element strides, some element types) come from
// the word, mask and shift that ptxas 12.9 emits for each `tensormap.replace` instruction.
// ../test_tensormap.py derives the table again from random shapes.
//
// Layout, as 32-bit little-endian words.  Words 16-31 are not written by the DSL and are ignored.
//
//   word   bits     field                                                how seen
//   0-1    all      global address (16-byte aligned)                     DSL, ptxas
//   2      0-3      2 for a tiled map                                    DSL (constant)
//   2      4-6      rank - 1                                             DSL, ptxas
//   2      7-10     element type: 0 u8, 1 u16, 2 u32, 3 s32, 4 u64,      DSL, ptxas
//                   5 s64, 6 f16, 7 f32, 8 f32.ftz, 9 f64, 10 bf16
//                   (the DSL writes signed and unsigned integers alike, and 8-bit floats as u8)
//   2      11-12    interleave: 0 none, 1 16 B, 2 32 B                   ptxas
//   2      13-14    swizzle: 0 none, 1 32 B, 2 64 B, 3 128 B             DSL, ptxas
//   2      15       out-of-bounds fill: 0 zeros, 1 NaN                   ptxas
//   2      16       1: tf32 (with element type 7 or 8)                   DSL, ptxas
//   2      17-18    L2 promotion, 2 (128 B) from the DSL; no effect here DSL (constant)
//   2      21       1 if the tensor has 128 KiB or more; no effect here  DSL
//   2      22       0; ptxas clears it when it sets the swizzle          ptxas
//   2      others   0
//   3-6    all      strides 1 to 4, bytes / 16, bits 0-31                DSL, ptxas
//   7      0-15     bits 32-35 of the four strides, 4 bits each          DSL, ptxas
//   8-12   all      dims 0 to 4, minus 1                                 DSL, ptxas
//   13     0-14     element strides 0 to 4, minus 1, 3 bits each         ptxas
//   13     24-31    box 0, minus 1                                       DSL, ptxas
//   14     all      boxes 1 to 4, minus 1, 8 bits each                   DSL, ptxas
//   15     all      0
#include <cstdio>
#include <cstring>

#include "ptxsim.h"

namespace {

thread_local char g_reason[160];

bool refuse(const char **why, const char *format, unsigned long long a = 0, unsigned long long b = 0) {
  snprintf(g_reason, sizeof g_reason, format, a, b);
  if (why) *why = g_reason;
  return false;
}

}  // namespace

bool ptxsim_decode_tensormap(const void *descriptor128, PtxsimTensorMap *out, const char **why) {
  if (why) *why = "";
  uint32_t w[16];
  memcpy(w, descriptor128, sizeof w);
  memset(out, 0, sizeof *out);

  const uint32_t head = w[2];
  if ((head & 15) != 2)
    return refuse(why, "word 2 bits 0-3 hold %llu: not a tiled tensor map (or not a tensor map)", head & 15);
  if (head & 0xffd80000u) return refuse(why, "word 2 is 0x%08llx: unknown bits set", head);
  if (w[7] >> 16) return refuse(why, "word 7 is 0x%08llx: unknown bits set", w[7]);
  if (w[13] & 0x00ff8000u) return refuse(why, "word 13 is 0x%08llx: unknown bits set", w[13]);
  if (w[15]) return refuse(why, "word 15 is 0x%08llx: unknown bits set", w[15]);

  const int rank = static_cast<int>((head >> 4) & 7) + 1;
  if (rank > 5) return refuse(why, "rank %llu", rank);
  out->rank = rank;

  const unsigned type = (head >> 7) & 15;
  const bool tf32 = (head >> 16) & 1;
  if (tf32) {
    if (type != 7) return refuse(why, "tf32 flag with element type %llu", type);
    out->element_bytes = 4;
    out->element_kind = 5;
  } else {
    switch (type) {
      case 0: out->element_bytes = 1; out->element_kind = 0; break;
      case 1: out->element_bytes = 2; out->element_kind = 0; break;
      case 2: out->element_bytes = 4; out->element_kind = 0; break;
      case 3: out->element_bytes = 4; out->element_kind = 1; break;
      case 4: out->element_bytes = 8; out->element_kind = 0; break;
      case 5: out->element_bytes = 8; out->element_kind = 1; break;
      case 6: out->element_bytes = 2; out->element_kind = 2; break;
      case 7: out->element_bytes = 4; out->element_kind = 4; break;
      case 9: out->element_bytes = 8; out->element_kind = 6; break;
      case 10: out->element_bytes = 2; out->element_kind = 3; break;
      default: return refuse(why, "element type %llu", type);
    }
  }

  out->interleave = (head >> 11) & 3;
  if (out->interleave) return refuse(why, "interleaved layout %llu", out->interleave);
  out->swizzle = (head >> 13) & 3;
  out->oob_fill = (head >> 15) & 1;

  const uint64_t address = w[0] | (static_cast<uint64_t>(w[1]) << 32);
  if (address % 16) return refuse(why, "global address 0x%llx is not a multiple of 16", address);
  out->global_address = reinterpret_cast<const uint8_t *>(address);

  for (int i = 0; i < 5; ++i) {
    out->dims[i] = 1;
    out->box[i] = out->element_strides[i] = 1;
  }
  out->strides[0] = static_cast<uint64_t>(out->element_bytes);
  for (int i = 0; i < rank; ++i) {
    out->dims[i] = static_cast<uint64_t>(w[8 + i]) + 1;
    out->box[i] = (i == 0 ? w[13] >> 24 : (w[14] >> (8 * (i - 1))) & 255) + 1;
    out->element_strides[i] = ((w[13] >> (3 * i)) & 7) + 1;
    if (i) {
      const uint64_t high = (w[7] >> (4 * (i - 1))) & 15;
      out->strides[i] = (static_cast<uint64_t>(w[2 + i]) | (high << 32)) * 16;
    }
  }

  // What the driver's encoder demands of these fields; the hardware's behaviour past it is unknown.
  const uint64_t inner = static_cast<uint64_t>(out->box[0]) * out->element_bytes;
  if (inner % 16) return refuse(why, "the inner box spans %llu bytes, not a multiple of 16", inner);
  if (out->swizzle && inner > (16ull << out->swizzle))
    return refuse(why, "the inner box spans %llu bytes, more than the %llu-byte swizzle", inner,
                  16ull << out->swizzle);
  return true;
}
