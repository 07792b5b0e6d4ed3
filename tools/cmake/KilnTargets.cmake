# kiln_library(NAME name SRCS ... DEPS ...)       static library kiln::name
# kiln_executable(NAME name SRCS ... DEPS ...)    bin/name
# kiln_test(NAME name SRCS ... DEPS ... [LABELS ...] [ARGS ...])
# kiln_embed(TARGET target OUTPUT stem NAMESPACE ns FILES ...)
#
# One library per box of the dependency graph. Includes are written from the
# repository root; no target adds another include folder.

add_library(kiln_options INTERFACE)
target_include_directories(kiln_options INTERFACE ${CMAKE_SOURCE_DIR})
target_compile_options(kiln_options INTERFACE
  -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror=return-type
  # False positives on std::string at -O3 (GCC bug 105651).
  $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-restrict>
  # Not in g++'s -Wconversion.
  $<$<COMPILE_LANG_AND_ID:CXX,Clang>:-Wno-sign-conversion>)
if(KILN_SANITIZE)
  target_compile_options(kiln_options INTERFACE
    -fsanitize=${KILN_SANITIZE} -fno-omit-frame-pointer
    -fno-sanitize-recover=all)
  target_link_options(kiln_options INTERFACE -fsanitize=${KILN_SANITIZE})
else()
  # The binaries travel to machines with another libstdc++. A target with the
  # property KILN_SHARED_LIBSTDCXX links the shared one all the same.
  set(shared_cxx "$<BOOL:$<TARGET_PROPERTY:KILN_SHARED_LIBSTDCXX>>")
  set(static_cxx "$<AND:$<LINK_LANGUAGE:CXX>,$<NOT:${shared_cxx}>>")
  target_link_options(kiln_options INTERFACE
    $<${static_cxx}:-static-libstdc++>
    $<${static_cxx}:-static-libgcc>)
endif()

function(kiln_library)
  cmake_parse_arguments(ARG "" "NAME" "SRCS;DEPS" ${ARGN})
  add_library(kiln_${ARG_NAME} STATIC ${ARG_SRCS})
  add_library(kiln::${ARG_NAME} ALIAS kiln_${ARG_NAME})
  target_link_libraries(kiln_${ARG_NAME} PUBLIC kiln_options ${ARG_DEPS})
endfunction()

function(kiln_executable)
  cmake_parse_arguments(ARG "" "NAME" "SRCS;DEPS" ${ARGN})
  add_executable(${ARG_NAME} ${ARG_SRCS})
  target_link_libraries(${ARG_NAME} PRIVATE kiln_options ${ARG_DEPS})
endfunction()

# Labels: unit (the default), slow, gpu, fuzz, bench. A test runs with the
# source folder in KILN_SOURCE_DIR so that it finds tests/data.
function(kiln_test)
  cmake_parse_arguments(ARG "" "NAME;TIMEOUT" "SRCS;DEPS;LABELS;ARGS" ${ARGN})
  if(NOT ARG_LABELS)
    set(ARG_LABELS unit)
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 900)
  endif()
  kiln_executable(NAME ${ARG_NAME} SRCS ${ARG_SRCS}
                  DEPS ${ARG_DEPS} GTest::gmock GTest::gtest_main)
  # Compiling a test takes longer than running it.
  set(optimisation -O1)
  if(KILN_SANITIZE)
    set(optimisation -O0)
  endif()
  target_compile_options(${ARG_NAME} PRIVATE ${optimisation})
  set_target_properties(${ARG_NAME} PROPERTIES
    RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  add_test(NAME ${ARG_NAME} COMMAND ${ARG_NAME} ${ARG_ARGS})
  set_tests_properties(${ARG_NAME} PROPERTIES
    LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT}
    ENVIRONMENT "KILN_SOURCE_DIR=${CMAKE_SOURCE_DIR};KILN_BIN_DIR=${CMAKE_BINARY_DIR}/bin")
endfunction()

# Puts the bytes of text files into a C++ source of `target`:
#   namespace ns { struct EmbeddedFile{...}; span Files(); }
# See tools/cmake/embed.py.
function(kiln_embed)
  cmake_parse_arguments(ARG "" "TARGET;OUTPUT;FUNCTION;ROOT" "FILES" ${ARGN})
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  set(output ${CMAKE_CURRENT_BINARY_DIR}/${ARG_OUTPUT}.cc)
  set(script ${CMAKE_SOURCE_DIR}/tools/cmake/embed.py)
  add_custom_command(
    OUTPUT ${output}
    COMMAND Python3::Interpreter ${script} --output ${output}
            --function ${ARG_FUNCTION} --root ${ARG_ROOT} ${ARG_FILES}
    DEPENDS ${script} ${ARG_FILES}
    VERBATIM)
  target_sources(${ARG_TARGET} PRIVATE ${output})
endfunction()
