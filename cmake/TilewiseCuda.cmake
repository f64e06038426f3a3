# The CUDA families. A folder of src/cuda with an instances.h is a family: that file lists its tile
# tables and its instances (table, element, head-dim tile). An instance is one source in the build
# tree, written from the instance.cu.in of the folder and compiled for the architectures of its
# table. Nothing here names a family.
#
#   TILEWISE_CUDA                 AUTO: for the GPU of this machine, if it has one and nvcc is found;
#                                 ON: for every architecture (takes minutes, needs no GPU); OFF
#   TILEWISE_CUDA_ARCHITECTURES   overrides that choice: "all", "native" or numbers, e.g. "90;120"
#   TILEWISE_CUDA_HEAD_DIMS       build only these head-dim tiles, e.g. "64;128"; "64;mma_sync:96" or
#                                 "64;Sm90:96" limits one to a family or a tile table; empty: all
#   TILEWISE_CUDA_ELEMENTS        build only these elements, e.g. "BF16" or, likewise, "F16;Sm90:BF16";
#                                 empty: all
#   TILEWISE_CUDA_TABLES          build only these tile tables, e.g. "Sm75;Sm90"; empty: all
#   TILEWISE_CUDA_FORCED_TABLES   also these tile tables, e.g. "Sm86;Sm120", as machine code for the
#                                 chosen GPUs, so that tests can force them without the GPUs they
#                                 are for. The chosen GPUs must have all instructions they use
#   TILEWISE_CUDA_EMULATOR        the same instances for this CPU, with tests/emulator; needs no nvcc
#
# For example, "90" builds tile table Sm90 with code for sm_90, and Sm75 and Sm80 as PTX, which the
# GPU's driver compiles when TILEWISE_FORCE_ARCH selects them. The library knows what it contains.
set(TILEWISE_CUDA_ARCHITECTURES "" CACHE STRING "\"all\", \"native\" or compute capabilities: \"90;120\"")
set(TILEWISE_CUDA_HEAD_DIMS "" CACHE STRING "Only these head-dim tiles (empty: all)")
set(TILEWISE_CUDA_ELEMENTS "" CACHE STRING "Only these elements (empty: all)")
set(TILEWISE_CUDA_TABLES "" CACHE STRING "Only these tile tables (empty: all)")
set(TILEWISE_CUDA_FORCED_TABLES "" CACHE STRING "Also these tile tables, for tests on these GPUs")

set(cuda_ptx_to_force 75 80) # tables that every GPU build can be forced to use

# --- which build ---------------------------------------------------------------------------------
# The compute capabilities of the GPUs of this machine, such as 90; empty if there is none.
function(tilewise_native_gpus result)
  set(found "")
  find_program(nvidia_smi nvidia-smi NO_CACHE)
  if(nvidia_smi)
    execute_process(COMMAND "${nvidia_smi}" --query-gpu=compute_cap --format=csv,noheader
                    OUTPUT_VARIABLE answer ERROR_QUIET RESULT_VARIABLE status)
    if(status EQUAL 0)
      string(REGEX MATCHALL "[0-9]+\\.[0-9]" found "${answer}")
      list(TRANSFORM found REPLACE "\\." "")
      list(REMOVE_DUPLICATES found)
    endif()
  endif()
  set(${result} "${found}" PARENT_SCOPE)
endfunction()

set(TILEWISE_CUDA_ENABLED OFF)
set(cuda_wanted "${TILEWISE_CUDA_ARCHITECTURES}")
if(TILEWISE_CUDA_EMULATOR)
  set(cuda_reason "emulated on this CPU")
elseif(NOT TILEWISE_CUDA)
  set(cuda_reason "off (TILEWISE_CUDA=OFF)")
else()
  if(cuda_wanted STREQUAL "" AND NOT TILEWISE_CUDA STREQUAL "AUTO")
    set(cuda_wanted all)
  endif()
  if(cuda_wanted MATCHES "^(native)?$")
    tilewise_native_gpus(cuda_native)
    if(NOT cuda_native AND cuda_wanted STREQUAL "native")
      message(FATAL_ERROR "TILEWISE_CUDA_ARCHITECTURES=native, but nvidia-smi names no GPU here")
    endif()
    set(cuda_wanted "${cuda_native}")
  endif()
  list(SORT cuda_wanted COMPARE NATURAL)
  if(NOT cuda_wanted)
    set(cuda_reason "off (no NVIDIA GPU here; -DTILEWISE_CUDA=ON builds for every GPU)")
  else()
    include(CheckLanguage)
    set(CMAKE_CUDA_ARCHITECTURES 75) # only for the compiler check: each instance names its own
    check_language(CUDA)
    set(cuda_problem "")
    if(NOT CMAKE_CUDA_COMPILER)
      set(cuda_problem "no CUDA compiler found: put nvcc into PATH or set CUDACXX to it")
    else()
      enable_language(CUDA)
      find_package(CUDAToolkit REQUIRED)
      if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.1)
        set(cuda_problem "nvcc is ${CMAKE_CUDA_COMPILER_VERSION}: st.async needs 12.1 or newer")
      endif()
    endif()
    if(NOT cuda_problem)
      set(TILEWISE_CUDA_ENABLED ON)
      list(JOIN cuda_wanted " " cuda_reason)
      set(cuda_reason "for ${cuda_reason}, nvcc ${CMAKE_CUDA_COMPILER_VERSION}")
    elseif(TILEWISE_CUDA STREQUAL "AUTO")
      set(cuda_reason "off (${cuda_problem})")
    else()
      message(FATAL_ERROR "TILEWISE_CUDA=${TILEWISE_CUDA}: ${cuda_problem}, or configure with "
                          "-DTILEWISE_CUDA=OFF")
    endif()
  endif()
endif()
message(STATUS "tilewise: CUDA ${cuda_reason}")

# --- which code of which tile table --------------------------------------------------------------
# The tile table that a compute capability uses: src/cuda/arch/limits.h.
function(tilewise_table_of sm result)
  set(table "")
  foreach(candidate IN LISTS cuda_tables)
    string(REGEX REPLACE "^Sm" "" first ${candidate})
    if(first MATCHES "^[0-9]+$" AND sm GREATER_EQUAL first)
      set(table ${candidate})
    endif()
  endforeach()
  set(${result} "${table}" PARENT_SCOPE)
endfunction()

# The architectures of "all" that this nvcc supports; those of a family of GPUs (100f) from 12.9 on.
function(tilewise_known_code table result)
  set(known "")
  foreach(each IN LISTS all_${table})
    string(REGEX MATCH "^[0-9]+" sm "${each}")
    if(each MATCHES "f-" AND CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.9)
      continue()
    endif()
    if(cuda_known MATCHES "compute_${sm}[^0-9]")
      list(APPEND known ${each})
    endif()
  endforeach()
  set(${result} "${known}" PARENT_SCOPE)
endfunction()
if(TILEWISE_CUDA_ENABLED)
  execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --list-gpu-arch OUTPUT_VARIABLE cuda_known
                  COMMAND_ERROR_IS_FATAL ANY)
endif()

# The machine code of a one-generation table (Sm90a, Sm100a) that a GPU of compute capability `sm`
# runs, empty if there is none: "90a" runs on 90 alone, "100f" on 100 and on the later GPUs of its
# family, such as 103.
function(tilewise_own_code table sm result)
  set(own "")
  tilewise_known_code(${table} known)
  foreach(each IN LISTS known)
    string(REGEX MATCH "^([0-9]+)([af])-" generation "${each}")
    if(NOT generation)
      continue()
    endif()
    set(first ${CMAKE_MATCH_1})
    set(of_family "${CMAKE_MATCH_2}")
    math(EXPR later "${sm} - ${first}")
    math(EXPR majors "${sm} / 10 - ${first} / 10")
    if(later EQUAL 0 OR (of_family STREQUAL "f" AND majors EQUAL 0 AND later GREATER 0))
      list(APPEND own ${each})
    endif()
  endforeach()
  set(${result} "${own}" PARENT_SCOPE)
endfunction()

# CMake architectures (90-real, 75-virtual) of a tile table or "any"; empty if not in this build.
function(tilewise_code_of table result)
  if(cuda_wanted STREQUAL "all")
    tilewise_known_code(${table} code)
    set(${result} "${code}" PARENT_SCOPE)
    return()
  endif()
  set(code "")
  foreach(sm IN LISTS cuda_wanted)
    tilewise_table_of(${sm} table_of_sm)
    if(table STREQUAL "any" OR table STREQUAL table_of_sm OR table IN_LIST TILEWISE_CUDA_FORCED_TABLES)
      list(APPEND code ${sm}-real)
    else()
      tilewise_own_code(${table} ${sm} own)
      list(APPEND code ${own})
    endif()
  endforeach()
  list(REMOVE_DUPLICATES code)
  string(REGEX REPLACE "^Sm" "" number "${table}")
  if(NOT code AND number IN_LIST cuda_ptx_to_force)
    foreach(sm IN LISTS cuda_wanted)
      if(sm GREATER number)
        set(code ${number}-virtual)
      endif()
    endforeach()
  endif()
  set(${result} "${code}" PARENT_SCOPE)
endfunction()

# --- instances -----------------------------------------------------------------------------------
# Whether a list of this build names the value, alone or with its family or tile table.
function(tilewise_is_chosen chosen value family table result)
  set(found OFF)
  if(NOT chosen OR value IN_LIST chosen OR "${family}:${value}" IN_LIST chosen
     OR "${table}:${value}" IN_LIST chosen)
    set(found ON)
  endif()
  set(${result} ${found} PARENT_SCOPE)
endfunction()

# Sets the list cuda_tables and, for each of its tables, cuda_number_<table> and all_<table> (the
# architectures of "all"); and the list cuda_instances, whose lines are
# "family table element head_dim head_dim_v [option of ptxas]", of the instances to build.
macro(tilewise_read_instances)
  file(GLOB cuda_lists CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/cuda/*/instances.h")
  set(program "${PROJECT_BINARY_DIR}/kernel_instances.cpp")
  set(TILEWISE_INCLUDE_INSTANCES "")
  set(TILEWISE_PRINT_INSTANCES "")
  foreach(each IN LISTS cuda_lists)
    cmake_path(GET each PARENT_PATH family)
    cmake_path(GET family FILENAME family)
    string(APPEND TILEWISE_INCLUDE_INSTANCES "#include \"cuda/${family}/instances.h\"\n")
    string(APPEND TILEWISE_PRINT_INSTANCES
           "  print(\"${family}\", ${family}::kTables,\n"
           "        [](auto visit) { ${family}::for_each_instance(visit); });\n")
  endforeach()
  configure_file("${PROJECT_SOURCE_DIR}/tools/kernel_instances.cpp.in" "${program}" @ONLY)
  set_property(DIRECTORY "${PROJECT_SOURCE_DIR}" APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
               ${cuda_lists} "${PROJECT_SOURCE_DIR}/src/cuda/kernel_instance.h")
  unset(cuda_lister_status CACHE)
  unset(cuda_lister_compiled CACHE)
  try_run(cuda_lister_status cuda_lister_compiled "${PROJECT_BINARY_DIR}/kernel_instances" "${program}"
          CMAKE_FLAGS "-DINCLUDE_DIRECTORIES=${PROJECT_SOURCE_DIR}/src;${PROJECT_SOURCE_DIR}/include"
          CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON
          COMPILE_OUTPUT_VARIABLE errors RUN_OUTPUT_VARIABLE output)
  if(NOT cuda_lister_compiled OR NOT cuda_lister_status EQUAL 0)
    message(FATAL_ERROR "${program}: ${errors}${output}")
  endif()
  string(REGEX MATCHALL "[^\n]+" lines "${output}")
  set(cuda_tables "")
  set(cuda_instances "")
  foreach(line IN LISTS lines)
    string(STRIP "${line}" line)
    string(REPLACE " " ";" fields "${line}")
    list(POP_FRONT fields kind)
    if(kind STREQUAL "table")
      list(POP_FRONT fields table number)
      list(APPEND cuda_tables ${table})
      set(cuda_number_${table} ${number})
      set(all_${table} ${fields})
      continue()
    endif()
    list(GET fields 0 family)
    list(GET fields 1 table)
    list(GET fields 2 element)
    list(GET fields 3 head_dim)
    tilewise_is_chosen("${TILEWISE_CUDA_ELEMENTS}" ${element} ${family} ${table} element_chosen)
    tilewise_is_chosen("${TILEWISE_CUDA_HEAD_DIMS}" ${head_dim} ${family} ${table} head_dim_chosen)
    if(element_chosen AND head_dim_chosen
       AND (NOT TILEWISE_CUDA_TABLES OR table STREQUAL "any" OR table IN_LIST TILEWISE_CUDA_TABLES))
      list(JOIN fields " " line)
      list(APPEND cuda_instances "${line}")
    endif()
  endforeach()
endmacro()

# nvcc's option for architectures: for 90-real, 100-real, 90-virtual it is
# arch=compute_90,code=[sm_90,sm_100,compute_90].
function(tilewise_code_option architectures result)
  list(GET architectures 0 oldest)
  string(REGEX REPLACE "-.*" "" oldest "${oldest}")
  list(TRANSFORM architectures REPLACE "(.*)-real" "sm_\\1")
  list(TRANSFORM architectures REPLACE "(.*)-virtual" "compute_\\1")
  list(JOIN architectures "," code)
  set(${result} "--generate-code=arch=compute_${oldest},code=[${code}]" PARENT_SCOPE)
endfunction()

function(tilewise_cuda_target target architectures)
  add_library(${target} OBJECT ${ARGN})
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/include"
                                               "${PROJECT_SOURCE_DIR}/src")
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  if(TILEWISE_CUDA_EMULATOR)
    tilewise_compile_options(${target})
    target_link_libraries(${target} PRIVATE tilewise_emulator)
    target_compile_options(
      ${target} PRIVATE "$<TARGET_PROPERTY:tilewise_emulator,TILEWISE_INSTANCE_OPTIONS>")
    # Always optimise: a lane is a fiber whose small stack holds what a GPU keeps in registers.
    target_compile_options(${target} PRIVATE -O2 -ffp-contract=off -Wno-unknown-pragmas)
    return()
  endif()
  set_target_properties(
    ${target} PROPERTIES CUDA_ARCHITECTURES OFF CUDA_RUNTIME_LIBRARY Static
                         CUDA_VISIBILITY_PRESET hidden)
  tilewise_code_option("${architectures}" code_option)
  target_compile_options(
    ${target}
    PRIVATE ${code_option}
            -std=c++20
            --expt-relaxed-constexpr
            --diag-suppress=128 # loops that are empty for some tile sizes
            -Xcompiler=-Wall,-Wextra
            $<$<VERSION_GREATER_EQUAL:${CMAKE_CUDA_COMPILER_VERSION},12.8>:--compress-mode=size>
            $<$<BOOL:${TILEWISE_WERROR}>:-Werror=all-warnings>)
endfunction()

# A row for cuda/kernel_set.h: "{90, {90, 100}, {90}},".
function(tilewise_code_row table architectures result)
  set(sass "")
  set(ptx "")
  foreach(each IN LISTS architectures)
    string(REGEX MATCH "^[0-9]+" sm "${each}")
    if(each MATCHES "-virtual$")
      list(APPEND ptx ${sm})
    else()
      list(APPEND sass ${sm})
    endif()
  endforeach()
  list(JOIN sass ", " sass)
  list(JOIN ptx ", " ptx)
  set(${result} "    {${cuda_number_${table}}, {${sass}}, {${ptx}}},\n" PARENT_SCOPE)
endfunction()

# Adds src/cuda to the object library: the host code always, so that any build can plan for any
# described GPU, and the instances if they are compiled.
function(tilewise_add_cuda target)
  set(source_dir "${PROJECT_SOURCE_DIR}/src/cuda")
  set(build_dir "${PROJECT_BINARY_DIR}/cuda")
  file(GLOB host CONFIGURE_DEPENDS "${source_dir}/*.cpp" "${source_dir}/*/*.cpp")
  list(FILTER host EXCLUDE REGEX "/runtime_[^/]*$")
  set(TILEWISE_INSTANCE_DECLARATIONS "")
  set(TILEWISE_INSTANCE_POINTERS "")
  set(TILEWISE_CODE_ROWS "")
  set(TILEWISE_EMULATED false)
  set(objects "")
  if(TILEWISE_CUDA_EMULATOR)
    set(runtime emulator)
    set(extension cpp)
    set(TILEWISE_EMULATED true)
  elseif(TILEWISE_CUDA_ENABLED)
    set(runtime cuda)
    set(extension cu)
  else()
    set(runtime none)
  endif()

  if(NOT runtime STREQUAL "none")
    tilewise_read_instances()
    foreach(table IN LISTS cuda_tables)
      set(sources_${table} "")
    endforeach()
    foreach(line IN LISTS cuda_instances)
      string(REPLACE " " ";" fields "${line}")
      list(POP_FRONT fields family table TILEWISE_ELEMENT TILEWISE_HEAD_DIM TILEWISE_HEAD_DIM_V
           ptxas)
      set(TILEWISE_ARCH ${table})
      tilewise_code_of(${table} code)
      if(code OR TILEWISE_CUDA_EMULATOR)
        string(TOLOWER "${family}_${table}_${TILEWISE_ELEMENT}_d${TILEWISE_HEAD_DIM}" name)
        if(NOT TILEWISE_HEAD_DIM_V EQUAL TILEWISE_HEAD_DIM)
          string(APPEND name "_${TILEWISE_HEAD_DIM_V}")
        endif()
        set(TILEWISE_INSTANCE "kernels_${name}")
        set(file "${build_dir}/${name}.${extension}")
        configure_file("${source_dir}/${family}/instance.cu.in" "${file}" @ONLY)
        if(ptxas AND extension STREQUAL "cu")
          set_source_files_properties("${file}" PROPERTIES COMPILE_OPTIONS -Xptxas=${ptxas})
        endif()
        list(APPEND sources_${table} "${file}")
        string(APPEND TILEWISE_INSTANCE_DECLARATIONS "extern const KernelSet ${TILEWISE_INSTANCE};\n")
        string(APPEND TILEWISE_INSTANCE_POINTERS "    &${TILEWISE_INSTANCE},\n")
      endif()
    endforeach()
    # The kernels that every family needs. A generated file includes them, because its extension
    # (.cu or .cpp) selects the compiler.
    file(CONFIGURE OUTPUT "${build_dir}/common.${extension}"
         CONTENT "#include \"cuda/common/kernels.cu\"\n" @ONLY)
    list(APPEND sources_any "${build_dir}/common.${extension}")
    foreach(table IN LISTS cuda_tables)
      if(sources_${table})
        set(code "")
        if(NOT TILEWISE_CUDA_EMULATOR)
          tilewise_code_of(${table} code)
        endif()
        string(TOLOWER "tilewise_cuda_${table}" instances_target)
        tilewise_cuda_target(${instances_target} "${code}" ${sources_${table}})
        list(APPEND objects "$<TARGET_OBJECTS:${instances_target}>")
        tilewise_code_row(${table} "${code}" row)
        string(APPEND TILEWISE_CODE_ROWS "${row}")
        list(LENGTH sources_${table} count)
        message(STATUS "tilewise: CUDA ${table}: ${count} instances ${code}")
      endif()
    endforeach()
  endif()

  configure_file("${source_dir}/registry.cpp.in" "${build_dir}/registry.cpp" @ONLY)
  target_sources(${target} PRIVATE ${host} "${source_dir}/runtime_${runtime}.cpp"
                                   "${build_dir}/registry.cpp")
  # The instances are objects of separate libraries, which every target that links ours needs.
  target_sources(${target} INTERFACE ${objects})
  set_property(TARGET ${target} PROPERTY TILEWISE_CUDA_OBJECTS "${objects}")
  if(TILEWISE_CUDA_ENABLED)
    target_include_directories(${target} SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
    target_link_libraries(${target} PUBLIC CUDA::cudart_static)
  elseif(TILEWISE_CUDA_EMULATOR)
    target_link_libraries(${target} PUBLIC tilewise_emulator)
  endif()
endfunction()
