// What vkback calls of the module: memory to write a source into, a compile for Vulkan 1.2, and its result.
#include <shaderc/shaderc.h>
#include <stdlib.h>

#define EXPORT(name) __attribute__((export_name(#name))) name

static shaderc_compiler_t compiler;

void *EXPORT(reserve)(size_t size) { return malloc(size); }

void EXPORT(release)(void *memory) { free(memory); }

// The result of a compute shader, to be given back by done. optimize: 0 or 1.
shaderc_compilation_result_t EXPORT(compile)(const char *source, size_t size, int optimize) {
    if (!compiler) compiler = shaderc_compiler_initialize();
    shaderc_compile_options_t options = shaderc_compile_options_initialize();
    shaderc_compile_options_set_target_env(options, shaderc_target_env_vulkan, shaderc_env_version_vulkan_1_2);
    shaderc_compile_options_set_optimization_level(options, optimize ? shaderc_optimization_level_performance : shaderc_optimization_level_zero);
    shaderc_compilation_result_t result =
        shaderc_compile_into_spv(compiler, source, size, shaderc_compute_shader, "shader", "main", options);
    shaderc_compile_options_release(options);
    return result;
}

int EXPORT(status)(shaderc_compilation_result_t result) { return shaderc_result_get_compilation_status(result); }

size_t EXPORT(length)(shaderc_compilation_result_t result) { return shaderc_result_get_length(result); }

const char *EXPORT(bytes)(shaderc_compilation_result_t result) { return shaderc_result_get_bytes(result); }

const char *EXPORT(message)(shaderc_compilation_result_t result) { return shaderc_result_get_error_message(result); }

void EXPORT(done)(shaderc_compilation_result_t result) { shaderc_result_release(result); }
