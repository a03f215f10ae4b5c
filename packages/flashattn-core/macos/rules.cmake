# How archives and bundles are made; read after CMake's own rules for Darwin.

set(CMAKE_CXX_ARCHIVE_CREATE "$ENV{FLASHATTN_ZIG} ar qc <TARGET> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_APPEND "$ENV{FLASHATTN_ZIG} ar q <TARGET> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_FINISH "$ENV{FLASHATTN_ZIG} ranlib <TARGET>")
string(JOIN " " CMAKE_CXX_CREATE_SHARED_MODULE
  $ENV{FLASHATTN_CLANG} --target=arm64-apple-macos14.0 -isysroot $ENV{FLASHATTN_SYSROOT}
  -fuse-ld=lld -Wl,-adhoc_codesign -Wl,-fixup_chains
  -bundle <LINK_FLAGS> -o <TARGET> <OBJECTS> <LINK_LIBRARIES>)
