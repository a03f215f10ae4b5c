# Compiles for macOS 14 on arm64 with zig, which carries the headers, and links with LLVM's linker through clang: zig's own
# makes no loadable bundles. build.py sets the environment variables.

set(CMAKE_SYSTEM_NAME Darwin)
set(CMAKE_SYSTEM_VERSION 23.0.0)  # macOS 14
set(CMAKE_SYSTEM_PROCESSOR arm64)
set(CMAKE_OSX_DEPLOYMENT_TARGET "" CACHE STRING "" FORCE)  # is part of the target below
set(CMAKE_OSX_SYSROOT "" CACHE STRING "" FORCE)            # zig has its own

set(CMAKE_CXX_COMPILER $ENV{FLASHATTN_ZIG} c++)
set(CMAKE_CXX_COMPILER_TARGET aarch64-macos.14.0)
string(JOIN " " CMAKE_CXX_FLAGS_INIT
  -fno-sanitize=undefined  # zig's default in debug builds
  # Without this libc++'s headers take the library for as new as they are, and inline code that asks for symbols
  # which macOS 14 lacks.
  -U_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS -D_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS=1
  -fno-sized-deallocation  # as in Apple's clang
  -isystem $ENV{FLASHATTN_SYSROOT}/headers)

set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)  # probes compile, and do not link
set(CMAKE_USER_MAKE_RULES_OVERRIDE ${CMAKE_CURRENT_LIST_DIR}/rules.cmake)
set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)  # a changed file would lose the signature that the linker has made

set(MLX_DIR $ENV{FLASHATTN_MLX}/share/cmake/MLX CACHE PATH "" FORCE)
set(Python_INCLUDE_DIR $ENV{FLASHATTN_SYSROOT}/python CACHE PATH "" FORCE)
set(SKBUILD_SOABI $ENV{FLASHATTN_SOABI} CACHE STRING "" FORCE)  # in the name of a module for one CPython
