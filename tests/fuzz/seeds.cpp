// Writes the seed corpus: the simplest call, calls with one option each, and calls with several
// bytes that differ from the simplest choice. Usage: fuzz_seeds FOLDER
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

namespace {

void write(const std::string& folder, int number, const std::vector<uint8_t>& bytes) {
  std::ofstream file(folder + "/seed" + std::to_string(number), std::ios::binary);
  file.write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
  if (!file) {
    std::fprintf(stderr, "cannot write into %s\n", folder.c_str());
    std::exit(1);
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) {
    std::fprintf(stderr, "usage: fuzz_seeds FOLDER\n");
    return 2;
  }
  const std::string folder = arguments[1];
  constexpr std::size_t kBytes = 120;
  int number = 0;
  write(folder, number++, {});
  for (std::size_t i = 0; i < kBytes; ++i) {
    for (int value : {1, 2, 4, 5, 8, 16, 32}) {
      std::vector<uint8_t> bytes(kBytes, 0);
      bytes[i] = static_cast<uint8_t>(value);
      write(folder, number++, bytes);
    }
  }
  uint32_t state = 1;
  const auto random = [&state] { return (state = state * 1664525u + 1013904223u) >> 16; };
  for (int i = 0; i < 300; ++i) {
    std::vector<uint8_t> bytes(kBytes, 0);
    for (std::size_t k = 0; k < 4 + random() % 20; ++k)
      bytes[random() % kBytes] = static_cast<uint8_t>(random() % 64);
    write(folder, number++, bytes);
  }
  return 0;
}
