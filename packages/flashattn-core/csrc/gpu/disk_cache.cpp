// A file begins with a line that has two checksums: one of the key and one of the cached bytes. The key and the bytes
// follow. A file with a wrong checksum is ignored.
#include "disk_cache.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string_view>
#include <system_error>
#include <utility>

namespace flashattn::gpu {
namespace {

namespace fs = std::filesystem;

fs::path file_of(const std::string& folder, const std::string& key) {
  fs::path all = cache_folder();
  return all.empty() ? all : all / folder / sum_of(key);
}

// Makes a folder, and those above it that are missing, for this user alone.
void make_folder(const fs::path& path) {
  if (path.empty() || ::mkdir(path.c_str(), S_IRWXU) == 0 || errno != ENOENT) return;
  make_folder(path.parent_path());
  ::mkdir(path.c_str(), S_IRWXU);
}

// Whether nobody but this user and root may have written there. Only then the bytes may be run as machine code.
bool is_private(const fs::path& path) {
  struct stat found = {};
  return stat(path.c_str(), &found) == 0 && (found.st_uid == geteuid() || found.st_uid == 0) &&
         (found.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

std::string content(const std::string& key, const std::string& bytes) {
  return sum_of(key) + " " + sum_of(bytes) + "\n" + key + bytes;
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

std::string read_private(const std::string& path) {
  if (!is_private(fs::path(path).parent_path()) || !is_private(path)) return "";
  std::stringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

std::string costs_file(const std::string& gpu) {
  std::string name = gpu, folder = cache_folder();
  for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
  return folder.empty() ? "" : fs::path(folder) / "costs" / (name + ".def");
}

std::string read_kept(const std::string& folder, const std::string& key) {
  std::string text = read_private(file_of(folder, key));
  std::string bytes(std::string_view(text).substr(std::min(text.find('\n') + 1 + key.size(), text.size())));
  return text == content(key, bytes) ? bytes : "";
}

std::string keep(const std::string& folder, const std::string& key, const std::string& bytes) {
  fs::path file = file_of(folder, key), unfinished = file;
  if (file.empty()) {
    return "";
  }
  unfinished += "." + std::to_string(getpid());
  std::error_code failed;
  make_folder(file.parent_path());
  if (!is_private(file.parent_path())) return "";
  std::ofstream out(unfinished, std::ios::binary);
  out << content(key, bytes);
  out.close();
  bool is_whole = out && ::chmod(unfinished.c_str(), S_IRUSR | S_IWUSR) == 0;
  if (is_whole) {
    fs::rename(unfinished, file, failed);  // atomic, so that another process sees the whole file or none
  }
  if (!is_whole || failed) {
    fs::remove(unfinished, failed);
    return "";
  }
  return file;
}

}  // namespace flashattn::gpu
