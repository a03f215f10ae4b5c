// A cache on disk that keeps byte strings for later processes. Its folder is cache_folder(). Only this user may read
// it: folders are made with mode 0700. Folders and files that another user, except root, owns or may write to are not
// used.
#pragma once

#include <string>

namespace flashattn::gpu {

// A checksum of a text, the same in every process.
std::string sum_of(const std::string& text);

// Returns $FLASHATTN_CACHE, $XDG_CACHE_HOME/flashattn or $HOME/.cache/flashattn, using the first variable that is set
// and not empty. Returns "" if there is none.
std::string cache_folder();

// Returns what a file holds, or "" if it is missing or not private.
std::string read_private(const std::string& file);

// Returns the bytes that keep() wrote for the key, or "" if the file is missing, broken or not private.
std::string read_kept(const std::string& folder, const std::string& key);

// The file in which `mlxlm-flash tune` stores the costs of kernels on the GPU with this name; "" without a cache
// folder.
std::string costs_file(const std::string& gpu);

// Writes the bytes to a file and returns its path, or "" if that fails.
std::string keep(const std::string& folder, const std::string& key, const std::string& bytes);

}  // namespace flashattn::gpu
