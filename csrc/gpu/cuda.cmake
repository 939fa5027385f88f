# How the GPU part is built: with a toolkit's nvcc, with the compilers on PyPI, or not at all.
#
# Sets HORO_LITE_CUDA_FROM (nvcc, wheels or none); horo_lite_add_cuda(target) adds the sources.

# Turing and every later generation that the compiler of this version supports. One cubin serves all
# later GPUs of its generation, and PTX of the first every GPU without one: those of the future, and of
# generations that this compiler does not know. The kernels use nothing newer than Turing.
function(horo_lite_architectures version)
  set(known 75 80 90)
  if(version VERSION_GREATER_EQUAL 12.8)
    list(APPEND known 100)
  endif()
  if(version VERSION_GREATER_EQUAL 13)
    list(APPEND known 110)  # CUDA 12 has another number for it
  endif()
  if(version VERSION_GREATER_EQUAL 12.8)
    list(APPEND known 120)
  endif()
  if(NOT HORO_LITE_CUDA_ARCHITECTURES MATCHES "^(all)?$")
    set(known ${HORO_LITE_CUDA_ARCHITECTURES})
  endif()
  set(HORO_LITE_GENERATIONS ${known} PARENT_SCOPE)
  set(real ${known})
  list(TRANSFORM real APPEND "-real" REGEX "^[0-9]+[af]?$")
  list(GET known 0 oldest)
  if(oldest MATCHES "^[0-9]+$")
    list(APPEND real ${oldest}-virtual)
  endif()
  set(CMAKE_CUDA_ARCHITECTURES ${real} PARENT_SCOPE)
endfunction()

# The real nvcc: the one on PATH may be a script that calls one elsewhere, and the script's own
# location does not lead to the toolkit. Empty if there is none.
function(horo_lite_find_nvcc result)
  set(${result} "" PARENT_SCOPE)
  unset(HORO_LITE_NVCC CACHE)
  find_program(HORO_LITE_NVCC nvcc HINTS $ENV{CUDA_HOME}/bin ${CUDAToolkit_ROOT}/bin PATHS /usr/local/cuda/bin)
  if(HORO_LITE_NVCC)
    file(WRITE ${CMAKE_BINARY_DIR}/empty.cu "")
    execute_process(COMMAND ${HORO_LITE_NVCC} --dryrun -c ${CMAKE_BINARY_DIR}/empty.cu -o /dev/null
      ERROR_VARIABLE said)
    if(said MATCHES "_HERE_=([^\n]+)")
      set(${result} ${CMAKE_MATCH_1}/nvcc PARENT_SCOPE)
    endif()
  endif()
endfunction()

option(HORO_LITE_CUDA "Use a CUDA toolkit if there is one" ON)
set(HORO_LITE_CUDA_ARCHITECTURES "" CACHE STRING "all (the default), native or such as 90 or 75-virtual")
set(HORO_LITE_CUDA_WHEELS "" CACHE PATH "Folder nvidia/ with NVRTC, nvFatbin and the runtime of CUDA 12.9, from PyPI")
set(HORO_LITE_CUDA_FROM none)
if(NOT HORO_LITE_CUDA)
  message(STATUS "CUDA: turned off by HORO_LITE_CUDA")
elseif(HORO_LITE_CUDA_WHEELS)
  set(HORO_LITE_CUDA_FROM wheels)
  horo_lite_architectures(12.9)
  message(STATUS "CUDA 12.9 for ${HORO_LITE_GENERATIONS}: NVRTC of ${HORO_LITE_CUDA_WHEELS}")
else()
  horo_lite_find_nvcc(nvcc)
  if(nvcc AND CMAKE_CUDA_COMPILER AND DEFINED ENV{CUDA_HOME} AND NOT nvcc STREQUAL CMAKE_CUDA_COMPILER)
    message(FATAL_ERROR "CUDA: ${CMAKE_BINARY_DIR} was configured with ${CMAKE_CUDA_COMPILER}, but CUDA_HOME now "
      "leads to ${nvcc}. Delete that directory.")
  endif()
  if(CMAKE_CUDA_COMPILER)
    set(nvcc ${CMAKE_CUDA_COMPILER})
  endif()
  if(nvcc)
    execute_process(COMMAND ${nvcc} --version OUTPUT_VARIABLE said)
    string(REGEX MATCH "release ([0-9.]+)" said "${said}")
    set(release ${CMAKE_MATCH_1})
    set(ENV{CUDACXX} ${nvcc})
    include(CheckLanguage)
    check_language(CUDA)
    if(release VERSION_LESS 12.1)
      message(STATUS "CUDA: ${nvcc} is ${release}, and kernels with more than 4 KiB of parameters need 12.1; "
        "this build will not work with GPUs")
    elseif(CMAKE_CUDA_COMPILER)
      horo_lite_architectures("${release}")
      set(HORO_LITE_CUDA_FROM nvcc)
      message(STATUS "CUDA ${release} for ${HORO_LITE_GENERATIONS}: ${nvcc}. Each takes some 10 s of CPU time; "
        "HORO_LITE_CUDA_ARCHITECTURES=90 (or native) builds for one, HORO_LITE_CUDA=0 without CUDA")
      set(CMAKE_CUDA_STANDARD 17)
      set(CMAKE_CUDA_STANDARD_REQUIRED ON)
      set(CMAKE_CUDA_EXTENSIONS OFF)
      set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
      set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
      enable_language(CUDA)
      find_package(CUDAToolkit REQUIRED)
    elseif(DEFINED ENV{CUDA_HOME})
      message(FATAL_ERROR "CUDA: ${nvcc} cannot compile; perhaps it does not know this C++ compiler (CUDAHOSTCXX names "
        "another, HORO_LITE_CUDA=0 builds without CUDA)")
    else()
      message(STATUS "CUDA: ${nvcc} cannot compile; this build will not work with GPUs")
    endif()
  else()
    message(STATUS "CUDA: no toolkit found (CUDA_HOME names one); this build will not work with GPUs")
  endif()
endif()

function(horo_lite_add_cuda target)
  if(HORO_LITE_CUDA_FROM STREQUAL "none")
    target_sources(${target} PRIVATE gpu/no_cuda.cpp)
    return()
  endif()
  target_sources(${target} PRIVATE gpu/device_cuda.cpp gpu/kernels_cuda.cpp)
  if(HORO_LITE_CUDA_FROM STREQUAL "nvcc")
    add_library(kernels STATIC gpu/kernels.cu)
    # No contraction: the host kernels round after every operation. Compressed in the format that every
    # driver can read. Architectures are compiled in parallel.
    target_include_directories(kernels PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
    target_compile_options(kernels PRIVATE --fmad=false -Xfatbin=-compress-all --threads=0)
    target_link_libraries(${target} PRIVATE kernels CUDA::cudart_static)
  else()
    # nvcc 12 is not on PyPI; NVRTC, the same compiler as a library, is. Its output is embedded and passed
    # to the runtime when the first kernel is launched. Any Python will do: with the one that the module is
    # built for, each version would compile the kernels again.
    set(fatbin ${CMAKE_CURRENT_BINARY_DIR}/kernels.fatbin)
    add_custom_command(OUTPUT ${fatbin}
      COMMAND python3 ${CMAKE_CURRENT_SOURCE_DIR}/gpu/compile_kernels.py
              ${HORO_LITE_CUDA_WHEELS} ${fatbin} ${HORO_LITE_GENERATIONS}
      DEPENDS gpu/compile_kernels.py gpu/kernels.cu gpu/kernel_body.h gpu/pieces.h
      VERBATIM)
    set_source_files_properties(gpu/kernels_embedded.cpp PROPERTIES
      OBJECT_DEPENDS ${fatbin} COMPILE_DEFINITIONS HORO_LITE_FATBIN="${fatbin}")
    target_sources(${target} PRIVATE gpu/kernels_embedded.cpp)
    target_include_directories(${target} SYSTEM PRIVATE
      ${HORO_LITE_CUDA_WHEELS}/cuda_runtime/include ${HORO_LITE_CUDA_WHEELS}/cuda_nvcc/include)
    target_link_libraries(${target} PRIVATE ${HORO_LITE_CUDA_WHEELS}/cuda_runtime/lib/libcudart_static.a)
  endif()
endfunction()
