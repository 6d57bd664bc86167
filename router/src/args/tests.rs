use super::*;

fn parse(arguments: &[&str]) -> Result<Args, clap::Error> {
    Args::try_parse_from(["router"].iter().chain(arguments))
}

#[test]
fn the_command_line_definition_is_valid() {
    use clap::CommandFactory as _;
    Args::command().debug_assert();
}

#[test]
fn replicas_are_given_by_address_name_or_service() {
    let args = parse(&[
        "--replica=127.0.0.1:8001/50051,[::1]:8002",
        "--replicas-dns=replicas.local:8000/50051",
        "--replicas-service=models/chat",
        "--replicas-service=code",
    ])
    .unwrap();
    let shown: Vec<_> = args.replicas.iter().map(ToString::to_string).collect();
    assert_eq!(shown, ["127.0.0.1:8001/50051", "[::1]:8002"]);
    assert_eq!(args.replicas_dns[0].to_string(), "replicas.local:8000/50051");
    let services: Vec<_> = args.replicas_service.iter().map(ToString::to_string).collect();
    assert_eq!(services, ["models/chat", "code"]);
}

#[test]
fn errors_about_invalid_values_name_the_flag() {
    for wrong in [
        "--replica=nowhere",
        "--replica=a:0",
        "--replica=a:1/x",
        "--replicas-dns=:80",
        "--replicas-service=a/b/c",
        "--replicas-service=A_b",
        "--policy=best",
        "--retry-budget-percent=101",
        "--attempts=0",
        "--idle-timeout=soon",
        "--max-body-bytes=8 potatoes",
        "--threads=0",
    ] {
        let error = parse(&[wrong]).unwrap_err().to_string();
        assert!(error.contains(wrong.split('=').next().unwrap()), "{error}");
    }
    let error = parse(&["--replicas-dns=:80"]).unwrap_err().to_string();
    assert!(error.contains("use NAME:PORT"), "{error}");
}
