use super::*;

fn parse(arguments: &[&str]) -> Result<Args, clap::Error> {
    Args::try_parse_from(["server"].iter().chain(arguments))
}

#[test]
fn the_command_line_is_consistent() {
    use clap::CommandFactory as _;
    Args::command().debug_assert();
}

#[test]
fn adapters_have_names_and_paths() {
    let args = parse(&["--backend=sim", "--lora=a=/x/y=z", "--lora", "b/c=d"]).unwrap();
    let named = |name: &str, path: &str| NamedAdapter { name: name.to_owned(), path: path.into() };
    assert_eq!(args.adapters, [named("a", "/x/y=z"), named("b/c", "d")]);
    for wrong in ["--lora=a", "--lora==b", "--lora=a="] {
        assert!(parse(&["--backend=sim", wrong]).unwrap_err().to_string().contains("NAME=PATH"));
    }
}

#[test]
fn evicted_blocks_are_stored_only_in_a_given_directory() {
    assert_eq!(parse(&["--backend=sim", "--kv-spill-bytes=1GiB"]).unwrap().spill.kv_spill_dir, None);
    let given = parse(&["--backend=sim", "--kv-spill-dir=/x/y", "--kv-spill-bytes=2MiB"]).unwrap().spill;
    assert_eq!((given.kv_spill_dir, given.kv_spill_bytes), (Some("/x/y".into()), ByteSize(2 << 20)));
    let wrong = parse(&["--backend=sim", "--kv-spill-dir=/x", "--no-prefix-caching"]).unwrap_err();
    assert!(wrong.to_string().contains("cannot be used with"), "{wrong}");
}

#[test]
fn a_model_with_a_tokenizer_of_its_own_does_not_simulate_images() {
    let wrong = parse(&["--backend=sim", "--sim-images", "--model=/x"]).unwrap_err();
    assert!(wrong.to_string().contains("cannot be used with"), "{wrong}");
    assert!(parse(&["--backend=sim", "--sim-images"]).is_ok());
}

#[test]
fn plugin_properties_are_pairs_or_json() {
    let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
    assert_eq!(plugin_config("A=b=c").unwrap().0, [pair("A", "b=c")]);
    assert_eq!(plugin_config(r#"{"A": 1, "B": "x", "C": true}"#).unwrap().0.len(), 3);
    for wrong in ["A", "=b", "{", r#"{"A": []}"#] {
        assert!(plugin_config(wrong).is_err(), "{wrong:?}");
    }
}

#[test]
fn values_out_of_range_are_rejected() {
    for wrong in ["--max-num-seqs=0", "--max-model-len=1", "--port=70000", "--host=nowhere", "--backend=x"] {
        let error = parse(&["--backend=sim", wrong]).unwrap_err().to_string();
        assert!(error.contains(wrong.split('=').next().unwrap()), "{error}");
    }
}

#[test]
fn parsers_are_selected_by_name_and_the_help_lists_them_all() {
    use clap::CommandFactory as _;
    let args = parse(&["--backend=sim"]).unwrap();
    assert_eq!((args.tool_parser, args.reasoning_parser), (ParserChoice::Auto, ParserChoice::Auto));
    let args = parse(&["--backend=sim", "--tool-parser=hermes3", "--reasoning-parser=none"]).unwrap();
    assert_eq!(args.tool_parser.given(), Some(ToolFormat::Hermes3));
    assert_eq!(args.reasoning_parser.given(), Some(ReasoningFormat::None));
    let error = parse(&["--tool-parser=hermes"]).unwrap_err().to_string();
    assert!(error.contains("unknown parser \"hermes\"; supported parsers: none, hermes3"), "{error}");
    let command = Args::command();
    let help = |flag: &str| {
        let argument = command.get_arguments().find(|argument| argument.get_long() == Some(flag)).unwrap();
        argument.get_long_help().unwrap().to_string()
    };
    for format in ToolFormat::ALL {
        assert!(help("tool-parser").contains(format.name()), "{}", format.name());
    }
    for format in ReasoningFormat::ALL {
        assert!(help("reasoning-parser").contains(format.name()), "{}", format.name());
    }
}

#[test]
fn images_are_fetched_only_from_given_places() {
    let default = parse(&["--backend=sim"]).unwrap().media;
    assert_eq!(format!("{default:?}"), format!("{:?}", crate::MediaPolicy::default()));
    let given = parse(&[
        "--backend=sim",
        "--allowed-media-domains=a.example,b.example:9000",
        "--allowed-media-domains=all",
        "--allowed-media-networks=10.0.0.0/8,fd00::/8",
        "--allowed-local-media-path=/x",
        "--media-url-allow-redirects",
        "--image-fetch-timeout=2s",
        "--max-image-bytes=1MiB",
    ]);
    let given = given.unwrap().media;
    assert_eq!((given.allowed_media_domains.len(), given.allowed_media_networks.len()), (3, 2));
    assert_eq!(given.allowed_local_media_path, Some("/x".into()));
    assert!(given.media_url_allow_redirects);
    assert_eq!(
        (given.image_fetch_timeout, given.max_image_bytes),
        (Duration::from_secs(2), ByteSize(1 << 20))
    );
    for (wrong, reason) in [
        ("--allowed-media-domains=*.example", "is not a host"),
        ("--allowed-media-networks=10.0.0.0", "is not a network"),
    ] {
        let error = parse(&["--backend=sim", wrong]).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
}
