// A file has the whole key, and the sums of it and of the code: what is not exactly what was asked for is not used.
#include "cubin_cache.h"

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>

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
fs::path folder() {
  if (const char* own = std::getenv("FLASHATTN_CACHE"); own && *own) {
    return fs::path(own) / "cubins";
  }
  if (const char* caches = std::getenv("XDG_CACHE_HOME"); caches && *caches) {
    return fs::path(caches) / "flashattn/cubins";
  }
  if (const char* home = std::getenv("HOME"); home && *home) {
    return fs::path(home) / ".cache/flashattn/cubins";
  }
  return {};
}

// What stands in front of the code.
std::string header(const std::string& key, const std::string& cubin) {
  return std::to_string(key.size()) + " " + std::to_string(cubin.size()) + " " + sum_of(cubin) + "\n" + key;
}

}  // namespace

std::string read_cubin(const std::string& key) {
  if (folder().empty()) {
    return {};
  }
  std::ifstream file(folder() / sum_of(key), std::ios::binary);
  std::stringstream content;
  content << file.rdbuf();
  std::string text = content.str();
  size_t line = text.find('\n');
  if (line == std::string::npos || line + 1 + key.size() > text.size()) {
    return {};
  }
  std::string cubin = text.substr(line + 1 + key.size());
  return text.compare(0, line + 1 + key.size(), header(key, cubin)) == 0 ? cubin : std::string();
}

void write_cubin(const std::string& key, const std::string& cubin) {
  std::error_code failed;
  fs::path into = folder();
  if (into.empty() || (fs::create_directories(into, failed), failed)) {
    return;
  }
  fs::path file = into / sum_of(key), unfinished = file;
  unfinished += "." + std::to_string(getpid());
  {
    std::ofstream out(unfinished, std::ios::binary);
    out << header(key, cubin) << cubin;
    if (!out.flush()) {
      out.close();
      fs::remove(unfinished, failed);
      return;
    }
  }
  fs::rename(unfinished, file, failed);  // at once: another process sees all of it or nothing
}

}  // namespace flashattn::cuda
