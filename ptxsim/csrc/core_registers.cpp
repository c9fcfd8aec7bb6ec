// setmaxnreg: the registers that a CTA's warps share.
#include "core_internal.h"

#include <algorithm>

namespace ptxsim {

enum { DEC = 1, INC = 2 };
constexpr uint32_t kRegisterFile = 65536, kMostRegisters = 255, kMostThreads = 2048;   // of an SM

// What ptxas 13.0 gives a kernel with setmaxnreg to start with: the register file divided among the
// warps of .minnctapersm CTAs, a multiple of 4 of them, rounded down to 8; no more than .maxnreg and
// the largest setmaxnreg.inc.  Without .minnctapersm and .maxnreg it drops every setmaxnreg: 0.
uint32_t start_registers(const Entry &e) {
  const uint32_t *size = e.reqntid[0] ? e.reqntid : e.maxntid;
  uint32_t threads = size[0] * size[1] * size[2], most = 0;
  if (threads && e.min_ctas && threads * e.min_ctas <= kMostThreads) {
    uint32_t warps = ((threads + 31) / 32 * e.min_ctas + 3) / 4 * 4;
    most = std::min(kMostRegisters, kRegisterFile / (32 * warps) / 8 * 8);
  }
  if (e.maxnreg) most = most ? std::min(most, e.maxnreg) : e.maxnreg;
  return e.most_inc ? std::min(most, e.most_inc) : most;
}

// Whether the warp's next setmaxnreg is that of its warpgroup; an error if not.
static bool in_step(Warp &w, const Inst &in, int lane) {
  Cta &c = *w.cta;
  auto &steps = c.wgs[w.id / 4]->setmaxnreg;
  if (w.register_steps == steps.size()) steps.push_back(&in);
  const Inst *other = steps[w.register_steps];
  if (other != &in) {
    w.mc->fail(&w, &in, lane, "another warp of the warpgroup executed line %d: %s instead", other->line, other->text.c_str());
    return false;
  }
  for (size_t i = w.id / 4 * 4; i < std::min<size_t>(c.warps.size(), w.id / 4 * 4 + 4); ++i) {
    const Warp &peer = *c.warps[i];
    if (peer.register_steps < w.register_steps) w.mc->fail(&w, &in, lane, "warp %u of the warpgroup has not executed the setmaxnreg before this one", peer.id);
    else if (peer.done && peer.register_steps == w.register_steps) w.mc->fail(&w, &in, lane, "warp %u of the warpgroup has exited without executing it", peer.id);
    if (w.mc->failed) return false;
  }
  return true;
}

static void h_setmaxnreg(Warp &w, const Inst &in, uint32_t mask) {
  Machine &mc = *w.mc; Cta &c = *w.cta;
  uint32_t n = (uint32_t)in.m[0]; int lane = __builtin_ctz(mask);
  if (n % 8 || n < 24 || n > 256) { mc.fail(&w, &in, lane, "register count %u is not a multiple of 8 from 24 to 256", n); return; }
  if (mask != w.live) { mc.fail(&w, &in, lane, "setmaxnreg executed by lanes %08x of %08x", mask, w.live); return; }
  if (!mc.registers) { mc.warn("setmaxnreg has no effect: entry %s has neither .minnctapersm nor .maxnreg, so ptxas drops it", mc.e->name.c_str()); return; }
  if (!in_step(w, in, lane)) return;
  if (in.op == DEC) {
    if (n > w.registers) { mc.fail(&w, &in, lane, "setmaxnreg.dec to %u registers, above the %u that the warp holds", n, w.registers); return; }
    c.register_pool += w.registers - n;
  } else {
    if (n < w.registers) { mc.fail(&w, &in, lane, "setmaxnreg.inc to %u registers, below the %u that the warp holds", n, w.registers); return; }
    if (n - w.registers > c.register_pool) { w.retry = true; return; }
    c.register_pool -= n - w.registers;
  }
  w.registers = n; w.register_steps++;
  mc.progress++;
}

void registers_exit(Warp &w) {
  auto &steps = w.cta->wgs[w.id / 4]->setmaxnreg;
  if (w.register_steps < steps.size())
    w.mc->fail(&w, steps[w.register_steps], 0, "the warp exits without executing this setmaxnreg, which another warp of its warpgroup did");
}

std::string register_wait(Warp &w, const Inst &in) {
  if (in.fn != h_setmaxnreg) return "";
  Cta &c = *w.cta;
  uint32_t start = (w.mc->registers + 7) / 8 * 8, total = 0;
  std::string held;
  for (auto &x : c.warps) {
    const Inst *next = nullptr;
    for (auto &g : x->groups) if (g.st == G_RETRY && w.mc->e->code[g.pc].fn == h_setmaxnreg) next = &w.mc->e->code[g.pc];
    total += next ? (uint32_t)next->m[0] : x->registers;
    held += strf(" %u", x->registers);
  }
  return strf("\n    waits for %u registers per thread: it holds %u, the CTA's pool has %u\n    %zu warps started with %u each, %zu in all; held now:%s; with what is waited for %u",
              (uint32_t)in.m[0] - w.registers, w.registers, c.register_pool, c.warps.size(), start, c.warps.size() * start, held.c_str(), total);
}

bool decode_registers(Inst &in, Dec &d) {
  if (d.parts[0] != "setmaxnreg") return false;
  bool inc = d.has("inc");
  if (inc == d.has("dec") || d.n() != 1 || d.ops[0].k != POp::INT) { d.why = "operands"; return true; }
  in.fn = h_setmaxnreg; in.sync = S_ALIGNED; in.op = inc ? INC : DEC;
  in.m[0] = (int32_t)d.ops[0].ival;
  if (inc) d.e->most_inc = std::max(d.e->most_inc, (uint32_t)in.m[0]);
  return true;
}

}  // namespace ptxsim
