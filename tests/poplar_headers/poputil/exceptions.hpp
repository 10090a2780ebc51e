#pragma once
#include <stdexcept>
#include <string>

namespace poputil {

struct poplibs_error : std::runtime_error {
  explicit poplibs_error(const std::string &text) : std::runtime_error(text) {}
};

}  // namespace poputil
