// Logits of tokens by llama.cpp on the CPU, with an adapter beside the model or without; bench/adapter_in_llama.py builds and calls this.
//
//     adapter_logits MODEL ADAPTER|- < token ids, int32 > logits, float32 [tokens][vocabulary]
//
// The adapter's strength is 1. K, V and attention are in F32, so that a model in F32 differs by rounding alone.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llama.h"

#define MOST 4096

static int failed(const char * what, const char * path) {
    fprintf(stderr, "%s %s\n", what, path);
    return 1;
}

static void only_errors(enum ggml_log_level level, const char * text, void * unused) {
    (void) unused;
    if (level == GGML_LOG_LEVEL_ERROR) {
        fputs(text, stderr);
    }
}

int main(int argc, char ** argv) {
    if (argc != 3) {
        return failed("usage:", "adapter_logits MODEL ADAPTER|-");
    }
    static llama_token tokens[MOST];
    const int n = (int) fread(tokens, sizeof(llama_token), MOST, stdin);

    llama_log_set(only_errors, NULL);
    llama_backend_init();
    struct llama_model_params model_params = llama_model_default_params();
    ggml_backend_dev_t none[] = {NULL};  // only the CPU
    model_params.devices = none;
    struct llama_model * model = llama_model_load_from_file(argv[1], model_params);
    if (model == NULL) {
        return failed("cannot load the model", argv[1]);
    }

    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = n;
    params.n_batch = params.n_ubatch = n;
    params.n_seq_max = 1;
    params.type_k = params.type_v = GGML_TYPE_F32;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    struct llama_context * context = llama_init_from_model(model, params);
    if (context == NULL) {
        return failed("no context for", argv[1]);
    }

    if (strcmp(argv[2], "-") != 0) {
        struct llama_adapter_lora * adapter = llama_adapter_lora_init(model, argv[2]);
        float strength = 1.0f;
        if (adapter == NULL || llama_set_adapters_lora(context, &adapter, 1, &strength) != 0) {
            return failed("cannot load the adapter", argv[2]);
        }
    }

    struct llama_batch batch = llama_batch_init(n, 0, 1);
    batch.n_tokens = n;
    for (int i = 0; i < n; i++) {
        batch.token[i] = tokens[i];
        batch.pos[i] = i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = 1;
    }
    if (llama_decode(context, batch) != 0) {
        return failed("cannot evaluate", argv[1]);
    }
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    for (int i = 0; i < n; i++) {
        fwrite(llama_get_logits_ith(context, i), sizeof(float), n_vocab, stdout);
    }
    return 0;
}
