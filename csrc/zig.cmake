# The toolchain of `make wheel`: zig, a package on PyPI, is Clang with the symbols of every glibc and for every processor.
# What it links for glibc 2.28 (of 2018) loads on nearly every Linux in use; the C++ library becomes part of the module.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR $ENV{HORO_LITE_WHEEL_CPU})
set(CMAKE_CXX_COMPILER zig c++ -target ${CMAKE_SYSTEM_PROCESSOR}-linux-gnu.2.28)
# nanobind's headers use stderr, and only GCC's C++ library declares it by the way.
set(CMAKE_CXX_FLAGS_INIT "-include cstdio")
