use super::*;

fn parse(arguments: &[&str]) -> Result<Args, clap::Error> {
    Args::try_parse_from(["server"].iter().chain(arguments))
}

#[test]
fn the_command_line_is_sound() {
    use clap::CommandFactory as _;
    Args::command().debug_assert();
}

#[test]
fn sizes_are_read_and_shown() {
    let read = |text: &str| text.parse::<ByteSize>().map(|size| size.0);
    assert_eq!(read("1000"), Ok(1000));
    assert_eq!(read("2GiB"), Ok(2 << 30));
    assert_eq!(read("2gi"), Ok(2 << 30));
    assert_eq!(read("1.5 MiB"), Ok(3 << 19));
    assert_eq!(read("3GB"), Ok(3_000_000_000));
    for wrong in ["", "GiB", "-1", "5PiB", "1e30GiB", "NaN", "99999999999GiB"] {
        assert!(read(wrong).is_err(), "{wrong:?}");
    }
    assert_eq!(ByteSize(8 << 20).to_string(), "8MiB");
    assert_eq!(ByteSize(1001).to_string(), "1001");
}

#[test]
fn times_are_read() {
    assert_eq!(duration("30s"), Ok(Duration::from_secs(30)));
    assert_eq!(duration("30"), Ok(Duration::from_secs(30)));
    assert_eq!(duration("250us"), Ok(Duration::from_micros(250)));
    assert_eq!(duration("1.5m"), Ok(Duration::from_secs(90)));
    for wrong in ["", "s", "-1s", "1y", "NaN", "1e300"] {
        assert!(duration(wrong).is_err(), "{wrong:?}");
    }
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
fn evicted_blocks_go_to_a_directory_if_one_is_given() {
    let folder = |args: &[&str]| parse(args).map(|args| args.spill.folder());
    assert_eq!(folder(&["--backend=sim", "--kv-spill-bytes=1GiB"]).unwrap(), None);
    let given = folder(&["--backend=sim", "--kv-spill-dir=/x/y", "--kv-spill-bytes=2MiB"]).unwrap();
    assert_eq!(given, Some(("/x/y".into(), 2 << 20)));
    let wrong = folder(&["--backend=sim", "--kv-spill-dir=/x", "--no-prefix-caching"]).unwrap_err();
    assert!(wrong.to_string().contains("cannot be used with"), "{wrong}");
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
fn values_out_of_range_are_refused() {
    for wrong in ["--max-num-seqs=0", "--max-model-len=1", "--port=70000", "--host=nowhere", "--weights=x"] {
        let error = parse(&["--backend=sim", wrong]).unwrap_err().to_string();
        assert!(error.contains(wrong.split('=').next().unwrap()), "{error}");
    }
}

#[test]
fn parsers_are_chosen_by_name_and_the_help_names_them_all() {
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
