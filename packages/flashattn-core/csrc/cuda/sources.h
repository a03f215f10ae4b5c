// The kernels' texts, which embed.py puts into the module when it is built.
#pragma once

#include <map>
#include <string>
#include <string_view>

namespace flashattn::cuda {

// Each file of kernels/, by its name without ".cu", with everything that it includes. ASCII.
const std::map<std::string, std::string_view>& sources();

}  // namespace flashattn::cuda
