#include "emulator/banks.h"

#include <algorithm>

namespace tilewise::cuda::emulator {
namespace {

constexpr int kBanks = 32;
constexpr int kBankBytes = 4;

// The number of wavefronts that accesses take which without conflicts would take a single one.
int64_t wavefronts(const Access* begin, const Access* end) {
  std::array<std::vector<uint32_t>, kBanks> words;
  size_t most = 1;
  for (const Access* a = begin; a != end; ++a) {
    const uint32_t first = a->offset / kBankBytes;
    const uint32_t last = (a->offset + static_cast<uint32_t>(a->bytes) - 1) / kBankBytes;
    for (uint32_t word = first; word <= last; ++word) {
      std::vector<uint32_t>& bank = words[word % kBanks];
      if (std::find(bank.begin(), bank.end(), word) == bank.end()) bank.push_back(word);
      most = std::max(most, bank.size());
    }
  }
  return static_cast<int64_t>(most);
}

}  // namespace

int64_t bank_conflicts(const std::vector<Access>& instruction) {
  if (instruction.empty()) return 0;
  const int bytes = std::max(instruction.front().bytes, kBankBytes);
  const auto per_wavefront = static_cast<size_t>(kBanks * kBankBytes / bytes);
  int64_t conflicts = 0;
  for (size_t i = 0; i < instruction.size(); i += per_wavefront) {
    const Access* begin = instruction.data() + i;
    conflicts += wavefronts(begin, begin + std::min(per_wavefront, instruction.size() - i)) - 1;
  }
  return conflicts;
}

// The first lane with accesses left determines the next instruction; lanes whose next access is
// another instruction did not take part in it.
int64_t AccessLog::take_conflicts() {
  std::array<size_t, 32> next{};
  int64_t conflicts = 0;
  std::vector<Access> instruction;
  for (size_t first = 0; first < lanes_.size(); ++first) {
    while (next[first] < lanes_[first].size()) {
      const void* place = lanes_[first][next[first]].place;
      instruction.clear();
      for (size_t lane = first; lane < lanes_.size(); ++lane) {
        const std::vector<Access>& log = lanes_[lane];
        if (next[lane] < log.size() && log[next[lane]].place == place) {
          instruction.push_back(log[next[lane]++]);
        }
      }
      conflicts += bank_conflicts(instruction);
    }
  }
  for (std::vector<Access>& log : lanes_) log.clear();
  empty_ = true;
  return conflicts;
}

}  // namespace tilewise::cuda::emulator
