// ptxsim: runs CuTe DSL kernels for sm_90a on a CPU, from their PTX.
// Interface between the simulator core (core*.cpp), the tensor-map decoder (tensormap.cpp),
// the runtime shim that compiled CuTe objects link against (runtime.cpp) and Python (native.py).
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {

// ---- options of one launch ------------------------------------------------------------
struct PtxsimOptions {
  uint64_t seed;          // drives every random choice
  int32_t resident_ctas;  // CTAs resident at a time over the whole device (clusters whole); 0 = 132
  int32_t warp_order;     // 0 round robin, 1 random interleaving
  int32_t cta_order;      // 0 ascending block index, 1 random dispatch order, 2 descending
  int32_t async_mode;     // bulk copies and reductions: 0 at once, 1 as late as allowed, 2 random time
  int32_t wgmma_mode;     // when WGMMA reads shared memory and writes its result: 0 at once, 1 at wait_group, 2 random between
  int32_t wgmma_math;     // 0 fp64 dot per instruction then one rounding, 1 sequential fp32 fma, 2 Hopper truncation model
  int32_t check_memory;   // 1: global accesses must lie in registered regions; shared accesses in the CTA's allocation
  int32_t poison_shared;  // 1: shared memory and unwritten registers start as NaN patterns
  int32_t check_races;    // 1: report shared-memory races found by vector clocks over barriers and mbarriers; 2: between lanes of a warp too
  int64_t max_steps;      // per launch, 0 = 2e9 warp instructions: past it the launch fails as a hang
  int64_t stall_steps;    // no progress for this many scheduler rounds = deadlock report; 0 = default
  int32_t check_fences;   // missing proxy fences, bulk stores pending at exit: 0 off, 1 in the report, 2 the launch fails
};
void ptxsim_default_options(PtxsimOptions *out);

// ---- modules ----------------------------------------------------------------------------
// Parses PTX text; returns a module handle or 0 (see ptxsim_error).  An unknown instruction is an
// error only when it is executed, and the error names its line and text.
int64_t ptxsim_load(const char *ptx_text, const char *name_for_messages);
void ptxsim_unload(int64_t module);
// Entry points: count, names; parameter sizes and offsets of one entry.
int32_t ptxsim_entry_count(int64_t module);
const char *ptxsim_entry_name(int64_t module, int32_t index);
int32_t ptxsim_param_count(int64_t module, const char *entry);
int32_t ptxsim_param_size(int64_t module, const char *entry, int32_t index);

// ---- memory -----------------------------------------------------------------------------
// Device addresses are host addresses.  Register what a kernel may touch.
void ptxsim_register_region(const void *base, size_t bytes, int32_t writable, const char *label);
void ptxsim_clear_regions();

// ---- launch -----------------------------------------------------------------------------
// args[i] points at parameter i's bytes (CUDA's kernelParams convention).
// Returns 0, or non-zero with ptxsim_error() saying what, where (entry, line, PTX text, CTA, warp, lane).
int32_t ptxsim_launch(int64_t module, const char *entry, const uint32_t grid[3], const uint32_t block[3],
                      const uint32_t cluster[3], uint32_t dynamic_shared_bytes, void *const *args,
                      const PtxsimOptions *options);
const char *ptxsim_error();
// JSON of the last launch: instructions by opcode class, TMA bytes, WGMMA count, barrier waits,
// atomics and reductions by type, max shared bytes, races, fence warnings, warnings.
const char *ptxsim_report();

}  // extern "C"

// ---- tensor maps (C++) --------------------------------------------------------------------
struct PtxsimTensorMap {
  const uint8_t *global_address;
  int32_t rank;               // 1..5
  int32_t element_bytes;
  int32_t element_kind;       // 0 unsigned/opaque, 1 signed, 2 f16, 3 bf16, 4 f32, 5 tf32, 6 f64
  uint64_t dims[5];           // elements, innermost first
  uint64_t strides[5];        // bytes; strides[0] = element_bytes
  uint32_t box[5];            // elements
  uint32_t element_strides[5];
  int32_t interleave;         // 0 none
  int32_t swizzle;            // 0 none, 1 = 32 B, 2 = 64 B, 3 = 128 B
  int32_t oob_fill;           // 0 zeros, 1 NaN
};
// Decodes the 128-byte hardware descriptor that CuTe DSL's host code builds.  Returns false with a
// reason when a field holds something it does not know.
bool ptxsim_decode_tensormap(const void *descriptor128, PtxsimTensorMap *out, const char **why);
