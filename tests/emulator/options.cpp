#include "emulator/options.h"

#include <cstdlib>
#include <string>

#include "emulator/grid.h"

namespace tilewise::cuda::emulator {
namespace {

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

[[noreturn]] void unknown(const char* name, const std::string& value, const char* allowed) {
  throw Fault(std::string(name) + "=" + value + ": it must be " + allowed);
}

}  // namespace

Options read_options() {
  Options options;
  const std::string copies = environment("TILEWISE_EMULATOR_COPIES");
  if (copies == "early") {
    options.early_copies = true;
  } else if (!copies.empty() && copies != "late") {
    unknown("TILEWISE_EMULATOR_COPIES", copies, "early or late");
  }
  const std::string order = environment("TILEWISE_EMULATOR_ORDER");
  if (order == "reverse") {
    options.order = Order::reverse;
  } else if (order == "shuffled") {
    options.order = Order::shuffled;
  } else if (order == "warps") {
    options.order = Order::warps;
  } else if (!order.empty() && order != "forward") {
    unknown("TILEWISE_EMULATOR_ORDER", order, "forward, reverse, shuffled or warps");
  }
  const std::string pdl = environment("TILEWISE_EMULATOR_PDL");
  if (pdl == "first") {
    options.pdl = Pdl::first;
  } else if (pdl == "second") {
    options.pdl = Pdl::second;
  } else if (!pdl.empty() && pdl != "none") {
    unknown("TILEWISE_EMULATOR_PDL", pdl, "none, first or second");
  }
  const std::string sums = environment("TILEWISE_EMULATOR_SUMS");
  if (sums == "truncated") {
    options.truncate_sums = true;
  } else if (!sums.empty() && sums != "rounded") {
    unknown("TILEWISE_EMULATOR_SUMS", sums, "rounded or truncated");
  }
  const std::string seed = environment("TILEWISE_EMULATOR_SEED");
  if (!seed.empty()) options.seed = std::strtoull(seed.c_str(), nullptr, 10);
  options.strict = environment("TILEWISE_EMULATOR_STRICT") == "1";
  options.check_races = environment("TILEWISE_EMULATOR_RACES") != "0";
  options.count_banks = environment("TILEWISE_EMULATOR_BANKS") == "1";
  options.report = environment("TILEWISE_EMULATOR_REPORT") == "1";
  return options;
}

}  // namespace tilewise::cuda::emulator
