// A file begins with a line that has two checksums: one of the key and one of the cached bytes. The key and the bytes
// follow. A file with a wrong checksum is ignored.
#include "disk_cache.h"

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>
#include <utility>

namespace flashattn::gpu {
namespace {

namespace fs = std::filesystem;

fs::path file_of(const std::string& folder, const std::string& key) {
  fs::path all = cache_folder();
  return all.empty() ? all : all / folder / sum_of(key);
}

std::string sums_of(const std::string& key, const std::string& bytes) {
  return sum_of(key) + " " + sum_of(bytes);
}

}  // namespace

// The hash function FNV-1a.
std::string sum_of(const std::string& text) {
  uint64_t sum = 0xcbf29ce484222325;
  for (unsigned char c : text) {
    sum = (sum ^ c) * 0x100000001b3;
  }
  return std::to_string(sum);
}

std::string cache_folder() {
  constexpr std::pair<const char*, const char*> kPlaces[] = {
      {"FLASHATTN_CACHE", ""}, {"XDG_CACHE_HOME", "flashattn"}, {"HOME", ".cache/flashattn"}};
  for (auto [variable, below] : kPlaces) {
    if (const char* place = std::getenv(variable); place && *place) return fs::path(place) / below;
  }
  return "";
}

std::string read_kept(const std::string& folder, const std::string& key) {
  std::ifstream file(file_of(folder, key), std::ios::binary);
  std::string sums;
  std::getline(file, sums);
  std::stringstream rest;
  rest << file.rdbuf();
  std::string bytes = rest.str();
  bytes.erase(0, bytes.starts_with(key) ? key.size() : bytes.size());
  return sums == sums_of(key, bytes) ? bytes : "";
}

std::string keep(const std::string& folder, const std::string& key, const std::string& bytes) {
  fs::path file = file_of(folder, key), unfinished = file;
  if (file.empty()) {
    return "";
  }
  unfinished += "." + std::to_string(getpid());
  std::error_code failed;
  fs::create_directories(file.parent_path(), failed);
  std::ofstream out(unfinished, std::ios::binary);
  out << sums_of(key, bytes) << "\n" << key << bytes;
  out.close();
  if (out) {
    fs::rename(unfinished, file, failed);  // atomic, so that another process sees the whole file or none
  }
  if (!out || failed) {
    fs::remove(unfinished, failed);
    return "";
  }
  return file;
}

}  // namespace flashattn::gpu
