//! Tests loading models from directories: the effect of each file.

#![expect(clippy::unwrap_used, reason = "a failed precondition fails the test")]

use std::fs;

use serde_json::{Value as Json, json};
use server_gguf::{
    GgufFile,
    write::{GgufWriter, write_parts},
};
use server_text::{ModelText, RenderInput};
use tempfile::TempDir;

struct Directory(TempDir);

impl Directory {
    /// Creates a directory whose tokenizer has tokens for single characters, two special tokens and a user-defined
    /// token.
    fn new() -> Self {
        let directory = Self(TempDir::new().unwrap());
        let mut vocab = serde_json::Map::new();
        for (id, byte) in (0x21..=0x7e).map(char::from).chain(['Ġ', 'Ċ']).enumerate() {
            vocab.insert(byte.to_string(), json!(id));
        }
        vocab.insert("Ġa".to_owned(), json!(96));
        let added = |id: u32, content: &str, special: bool| {
            json!({"id": id, "content": content, "special": special, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false})
        };
        directory.write("tokenizer.json", &json!({
            "version": "1.0",
            "truncation": {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
            "padding": null,
            "added_tokens": [added(97, "<s>", true), added(98, "</s>", true), added(99, "<t>", false)],
            "normalizer": null,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "post_processor": {"type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [97], "tokens": ["<s>"]}}},
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                "vocab": vocab, "merges": [["Ġ", "a"]]},
        }));
        directory
            .write("tokenizer_config.json", &json!({"bos_token": "<s>", "eos_token": {"content": "</s>"}}));
        directory.write(
            "config.json",
            &json!({"vocab_size": 128, "text_config": {"max_position_embeddings": 4096}}),
        );
        directory
    }

    fn write(&self, name: &str, value: &Json) {
        self.write_text(name, &value.to_string());
    }

    fn write_text(&self, name: &str, text: &str) {
        let path = self.0.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn load(&self) -> ModelText {
        ModelText::load(self.0.path()).unwrap()
    }

    fn refused(&self, parts: &[&str]) {
        let error = ModelText::load(self.0.path()).unwrap_err().to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error} lacks {parts:?}");
    }

    fn rendered(&self, name: Option<&str>) -> String {
        let input = RenderInput { name, ..RenderInput::default() };
        self.load().chat_template.unwrap().render(&input).unwrap()
    }
}

#[test]
fn the_tokenizer_of_a_directory_follows_its_files() {
    let model = Directory::new().load();
    let tokenizer = &model.tokenizer;
    let text = "b a<s><t> a";
    let show =
        |tokens: Vec<u32>| tokens.iter().map(|t| tokenizer.token_text(*t)).collect::<Vec<_>>().join("|");
    assert_eq!(show(tokenizer.encode(text, true, true).unwrap()), "<s>|b| a|<s>|<t>| a");
    assert_eq!(show(tokenizer.encode(text, false, true).unwrap()), "b| a|<s>|<t>| a");
    assert_eq!(show(tokenizer.encode(text, false, false).unwrap()), "b| a|<|s|>|<t>| a");
    assert_eq!(tokenizer.decode(&tokenizer.encode(text, true, true).unwrap(), true), "b a<t> a");
    assert_eq!((tokenizer.bos(), tokenizer.eos(), tokenizer.vocabulary_size()), (Some(97), Some(98), 100));
    assert_eq!((model.vocabulary_size, model.context_tokens_max), (128, Some(4096)));
    assert!(model.chat_template.is_none());
    assert_eq!(model.defaults.eos, [98]);
}

/// If such a tokenizer were loaded, every prompt would begin with an unknown token, and every request would be
/// rejected.
#[test]
fn a_post_processor_that_adds_an_unknown_token_is_refused() {
    let directory = Directory::new();
    let text = fs::read_to_string(directory.0.path().join("tokenizer.json")).unwrap();
    let mut file: Json = serde_json::from_str(&text).unwrap();
    file["post_processor"]["special_tokens"]["<s>"]["ids"] = json!([100]);
    directory.write("tokenizer.json", &file);
    directory.refused(&["tokenizer.json", "post_processor adds a token with the ID 100", "has 100 tokens"]);
}

/// If such a tokenizer were loaded, the `tokenizers` library would panic at the first text.
#[test]
fn a_template_that_names_an_undefined_special_token_is_refused() {
    let directory = Directory::new();
    let text = fs::read_to_string(directory.0.path().join("tokenizer.json")).unwrap();
    let sound: Json = serde_json::from_str(&text).unwrap();
    let template = |name: &str| {
        let mut template = sound["post_processor"].clone();
        template[name] = json!([{"SpecialToken": {"id": "<unknown>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]);
        template
    };
    for post_processor in [template("single"), json!({"type": "Sequence", "processors": [template("pair")]})]
    {
        let mut file = sound.clone();
        file["post_processor"] = post_processor;
        directory.write("tokenizer.json", &file);
        directory.refused(&["tokenizer.json", "post_processor names the special token \"<unknown>\""]);
    }
}

#[test]
fn flags_of_llama_tokenizers_override_the_post_processor() {
    let directory = Directory::new();
    let config = |flags: Json| {
        let mut config =
            json!({"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "LlamaTokenizerFast"});
        config.as_object_mut().unwrap().extend(flags.as_object().unwrap().clone());
        directory.write("tokenizer_config.json", &config);
        directory.load().tokenizer.encode("a", true, true).unwrap()
    };
    assert_eq!(config(json!({"add_bos_token": false})).len(), 1);
    assert_eq!(config(json!({"add_bos_token": true, "add_eos_token": true})).len(), 3);
    assert_eq!(config(json!({})).len(), 2);
}

#[test]
fn tokens_that_are_only_in_the_configuration_are_added() {
    let directory = Directory::new();
    let token = json!({"content": "<x>", "special": true, "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false});
    directory.write("tokenizer_config.json", &json!({"added_tokens_decoder": {"100": token}}));
    assert_eq!(directory.load().tokenizer.encode("<x>", false, true).unwrap(), [100]);
    directory.write("tokenizer_config.json", &json!({"added_tokens_decoder": {"105": token}}));
    directory.refused(&["tokenizer_config.json", "added_tokens_decoder"]);
}

#[test]
fn generation_config_sets_the_defaults() {
    let directory = Directory::new();
    directory.write(
        "generation_config.json",
        &json!({"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05,
        "repetition_penalty": 1.1, "frequency_penalty": 0.5, "presence_penalty": -0.5, "max_new_tokens": 100, "eos_token_id": [99, 98], "bos_token_id": 97,
        "do_sample": true, "stop_strings": ["END"]}),
    );
    let defaults = directory.load().defaults;
    assert_eq!((defaults.temperature, defaults.top_p, defaults.top_k), (Some(0.6), Some(0.9), Some(20)));
    assert_eq!((defaults.min_p, defaults.repetition_penalty), (Some(0.05), Some(1.1)));
    assert_eq!((defaults.frequency_penalty, defaults.presence_penalty), (Some(0.5), Some(-0.5)));
    assert_eq!((defaults.tokens_max, defaults.bos), (Some(100), Some(97)));
    assert_eq!(
        (defaults.eos.as_slice(), defaults.stop.as_slice()),
        ([98, 99].as_slice(), ["END".to_owned()].as_slice())
    );
    directory.write(
        "generation_config.json",
        &json!({"temperature": 0.6, "do_sample": false, "eos_token_id": 99}),
    );
    let defaults = directory.load().defaults;
    assert_eq!((defaults.temperature, defaults.eos.as_slice()), (Some(0.0), [99].as_slice()));
    directory.write("generation_config.json", &json!({"top_p": "much"}));
    directory.refused(&["generation_config.json", "top_p is not a number"]);
}

#[test]
fn templates_come_from_their_own_file_before_the_configuration() {
    let directory = Directory::new();
    let config = |template: Json| json!({"bos_token": "<s>", "chat_template": template});
    directory.write("tokenizer_config.json", &config(json!("config {{ bos_token }}")));
    assert_eq!(directory.rendered(None), "config <s>");
    let named = json!([{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]);
    directory.write("tokenizer_config.json", &config(named));
    assert_eq!(
        (directory.rendered(None), directory.rendered(Some("tool_use"))),
        ("d".to_owned(), "t".to_owned())
    );
    directory.write_text("chat_template.jinja", "file {{ bos_token }}");
    directory.write_text("additional_chat_templates/rag.jinja", "rag");
    assert_eq!(
        (directory.rendered(None), directory.rendered(Some("rag"))),
        ("file <s>".to_owned(), "rag".to_owned())
    );
    directory.write_text("chat_template.jinja", "{% endif %}");
    directory.refused(&["chat_template.jinja", "cannot be parsed"]);
}

#[test]
fn additional_templates_that_cannot_be_listed_are_refused() {
    let directory = Directory::new();
    directory.write_text("chat_template.jinja", "t");
    directory.write_text("additional_chat_templates", "not a directory");
    directory.refused(&["failed to read", "additional_chat_templates"]);
}

#[test]
fn faulty_directories_are_refused_with_file_and_field() {
    let directory = Directory::new();
    directory.write_text("config.json", "{");
    directory.refused(&["config.json is not valid JSON"]);
    directory.write_text("config.json", "{}");
    directory.write("tokenizer_config.json", &json!({"chat_template": 3}));
    directory.refused(&["tokenizer_config.json", "chat_template is neither"]);
    directory.write("tokenizer_config.json", &json!({"eos_token": 3}));
    directory.refused(&["tokenizer_config.json", "eos_token is neither"]);
    directory.write("tokenizer.json", &json!({"model": {"type": "Unheard"}}));
    directory.refused(&["tokenizer.json", "cannot be used"]);
    fs::remove_file(directory.0.path().join("tokenizer.json")).unwrap();
    directory.refused(&["has no tokenizer.json"]);
    let missing = ModelText::load(directory.0.path().join("missing")).unwrap_err().to_string();
    assert!(missing.starts_with("failed to read ") && missing.contains("missing"), "{missing}");
}

#[test]
fn a_gguf_file_gives_templates_defaults_and_names() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("small.gguf");
    let tokens: Vec<String> = ["<s>", "a", "<|im_end|>", "<|eot_id|>"].map(str::to_owned).to_vec();
    let mut writer = GgufWriter::new("qwen2");
    writer
        .metadata("qwen2.context_length", 512u32)
        .metadata("tokenizer.ggml.model", "gpt2")
        .metadata("tokenizer.ggml.pre", "qwen2")
        .metadata("tokenizer.ggml.tokens", tokens)
        .metadata("tokenizer.ggml.token_type", vec![3i32, 1, 3, 1])
        .metadata("tokenizer.ggml.merges", Vec::<String>::new())
        .metadata("tokenizer.ggml.eos_token_id", 0u32)
        .metadata("tokenizer.ggml.eot_token_id", 1u32)
        .metadata("general.sampling.temp", 0.25f32)
        .metadata("general.sampling.top_k", 7i32)
        .metadata("tokenizer.chat_template", "{{ eos_token }}!")
        .metadata("tokenizer.chat_template.tool_use", "tools");
    writer.write(&path).unwrap();
    let model = ModelText::from_gguf(&GgufFile::open(&path).unwrap()).unwrap();
    assert_eq!(
        (model.name.as_str(), model.context_tokens_max, model.vocabulary_size),
        ("small", Some(512), 4)
    );
    let parts = write_parts(&GgufFile::open(&path).unwrap(), directory.path(), "split", 2).unwrap();
    let split = ModelText::load(parts).unwrap();
    assert_eq!((split.name.as_str(), split.vocabulary_size), ("split", 4));
    // The last token looks like an end token, but is not a special token.
    assert_eq!(model.defaults.eos, [0, 1, 2]);
    assert_eq!((model.defaults.temperature, model.defaults.top_k), (Some(0.25), Some(7)));
    let template = model.chat_template.unwrap();
    assert_eq!(template.render(&RenderInput::default()).unwrap(), "<s>!");
    assert_eq!(template.names(), ["default", "tool_use"]);
}
