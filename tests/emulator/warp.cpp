// Exchange between the lanes of a warp.
#include "emulator/block.h"
#include "emulator/device.h"

namespace tilewise::cuda::emulator {
namespace {

struct Shuffle {
  uint32_t value;
  int from;
  uint32_t result;
};

uint32_t exchange(Collective collective, uint32_t value, int from) {
  Shuffle call{value, from, 0};
  block().meet(collective, call, [](std::array<Shuffle*, kLanes>& calls) {
    for (Shuffle* c : calls) c->result = calls[c->from % kLanes]->value;
    ++block().counts().shuffles;
  });
  return call.result;
}

int lane() { return block().thread() % kLanes; }

}  // namespace

void sync_warp() {
  struct None {
  } call;
  block().meet(Collective::sync_warp, call,
               [](std::array<None*, kLanes>&) { block().note_warp_barrier(); });
}

uint32_t shuffle_xor(uint32_t x, int mask) {
  return exchange(Collective::shuffle_xor, x, lane() ^ mask);
}
uint32_t shuffle(uint32_t x, int from) { return exchange(Collective::shuffle, x, from); }
float shuffle_xor(float x, int mask) { return float_of(shuffle_xor(bits_of(x), mask)); }
float shuffle(float x, int from) { return float_of(shuffle(bits_of(x), from)); }

bool any(bool x) {
  struct Vote {
    bool value;
    bool result;
  } call{x, false};
  block().meet(Collective::any, call, [](std::array<Vote*, kLanes>& calls) {
    bool result = false;
    for (Vote* c : calls) result |= c->value;
    for (Vote* c : calls) c->result = result;
    ++block().counts().shuffles;
  });
  return call.result;
}

}  // namespace tilewise::cuda::emulator
