// A file has the sum of the code, the whole key, and the code: what is not exactly what was asked for is not used.
#include "cubin_cache.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>
#include <utility>

namespace flashattn::cuda {
namespace {

namespace fs = std::filesystem;

// FNV-1a.
std::string sum_of(const std::string& text) {
  uint64_t sum = 0xcbf29ce484222325;
  for (unsigned char c : text) {
    sum = (sum ^ c) * 0x100000001b3;
  }
  char hex[17];
  std::snprintf(hex, sizeof(hex), "%016llx", static_cast<unsigned long long>(sum));
  return hex;
}

// Empty where the system names no folder for caches.
fs::path file_of(const std::string& key) {
  constexpr std::pair<const char*, const char*> kFolders[] = {
      {"FLASHATTN_CACHE", "cubins"}, {"XDG_CACHE_HOME", "flashattn/cubins"}, {"HOME", ".cache/flashattn/cubins"}};
  for (auto [variable, below] : kFolders) {
    if (const char* folder = std::getenv(variable); folder && *folder) {
      return fs::path(folder) / below / sum_of(key);
    }
  }
  return {};
}

// What stands in front of the code.
std::string header(const std::string& key, const std::string& cubin) {
  return sum_of(cubin) + "\n" + key + "\n";
}

}  // namespace

std::string read_cubin(const std::string& key) {
  std::ifstream file(file_of(key), std::ios::binary);
  std::stringstream content;
  content << file.rdbuf();
  std::string text = content.str(), cubin = text.substr(std::min(text.size(), header(key, {}).size()));
  return text.starts_with(header(key, cubin)) ? cubin : std::string();
}

void write_cubin(const std::string& key, const std::string& cubin) {
  fs::path file = file_of(key), unfinished = file;
  if (file.empty()) {
    return;
  }
  unfinished += "." + std::to_string(getpid());
  std::error_code failed;
  fs::create_directories(file.parent_path(), failed);
  std::ofstream out(unfinished, std::ios::binary);
  out << header(key, cubin) << cubin;
  out.close();
  if (out) {
    fs::rename(unfinished, file, failed);  // at once: another process sees all of it or nothing
  }
  if (!out || failed) {
    fs::remove(unfinished, failed);
  }
}

}  // namespace flashattn::cuda
