//! Tests `make run` and `ovfleet-operator local`, which run a resource on this machine without a cluster: recovery from
//! crashes, shutdown, and the messages for permanent errors.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::cell::Cell;
use std::net::TcpListener;
use std::process::Command;
use std::time::Duration;

use tests::process::{ExitReport, Process, await_condition, descendants, is_running, kill_process};
use tests::server::{START_LIMIT, STOP_LIMIT, binary, built, probe, without_settings};

/// The time limit for each awaited event. It is longer than the restart delay and the start of a server together.
const LIMIT: Duration = START_LIMIT;

/// The command `make run`, with the programs that were built together with this test.
fn make_run() -> Command {
    let mut command = without_settings(Command::new("make"));
    // If the test itself is run by make, the variables of that make would affect the inner make.
    for name in ["MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MODEL", "REPLICAS", "ARGS"] {
        command.env_remove(name);
    }
    let programs = binary().unwrap();
    let programs = programs.parent().unwrap().display().to_string();
    command.args(["--old-file=build", "run", &format!("BIN={programs}"), "PORT=0"]);
    command.current_dir(tests::root());
    command
}

/// The command `ovfleet-operator local` for the sample, with the simulator and a free port unless `arguments` override
/// them.
fn local(arguments: &[&str]) -> Command {
    let mut command = without_settings(Command::new(built("ovfleet-operator").unwrap()));
    command.args(["local", "-f", "deploy/samples/smollm2.yaml", "--cache", ".deps/cache"]);
    if !arguments.contains(&"--port") {
        command.args(["--port", "0"]);
    }
    if !arguments.contains(&"--model") {
        command.arg("--model").arg(tests::sample_model());
    }
    command.args(["--set", "engine.extraArgs=[--backend=sim]"]).args(arguments).current_dir(tests::root());
    command
}

/// Waits until the example request has been printed, and returns it.
fn example(run: &Process) -> String {
    run.await_line(LIMIT, |line| line.starts_with("Or open ").then_some(())).unwrap();
    let output = run.output();
    let example = &output[output.find("  curl ").unwrap()..];
    example[..example.find("}'").unwrap() + 2].to_owned()
}

fn paste(example: &str) -> ExitReport {
    let curl = Process::start(Command::new("bash").args(["-c", example])).unwrap();
    curl.wait(LIMIT).unwrap()
}

/// The processes of the resource, which are two servers and a router.
fn parts(run: &Process) -> Vec<(u32, String)> {
    let mut parts = descendants(run.id()).unwrap();
    parts.retain(|(_, name)| name == "ovfleet-server" || name == "ovfleet-router");
    parts.sort_by(|(_, a), (_, b)| a.cmp(b));
    let names: Vec<&str> = parts.iter().map(|(_, name)| name.as_str()).collect();
    assert_eq!(names, ["ovfleet-router", "ovfleet-server", "ovfleet-server"], "{}", run.output());
    parts
}

fn await_end_of(parts: &[(u32, String)]) {
    await_condition("all processes of the resource to end", STOP_LIMIT, || {
        (!parts.iter().any(|(id, _)| is_running(*id))).then_some(())
    })
    .unwrap();
}

#[test]
fn make_run_restarts_a_killed_replica_and_ctrl_c_ends_all_processes() {
    let run = Process::start(&mut make_run()).unwrap();
    let curl = example(&run);
    let answer = paste(&curl);
    assert!(answer.output.contains("Paris"), "{curl}\n{}\n{}", answer.output, run.output());

    let before = parts(&run);
    kill_process(before[1].0).unwrap();
    let (has_degraded, is_announced) = (Cell::new(false), Cell::new(false));
    run.await_line(LIMIT, |line| {
        is_announced.set(is_announced.get() || line.contains("has exited (signal: 9"));
        has_degraded.set(has_degraded.get() || line.starts_with("Degraded: 1/2 replicas ready"));
        (is_announced.get() && has_degraded.get() && line.starts_with("Ready: 2/2")).then_some(())
    })
    .unwrap();
    let after = parts(&run);
    assert_eq!((after[0].0, after.len()), (before[0].0, 3), "the router was restarted");
    assert!(paste(&curl).output.contains("Paris"), "{}", run.output());

    // A terminal signals the whole group, including make.
    run.signal_group("INT").unwrap();
    let ended = run.wait(STOP_LIMIT).unwrap();
    assert!(ended.output.contains("finishing the running requests"), "{}", ended.output);
    await_end_of(&after);
    let address = curl.split("http://").nth(1).unwrap().split('/').next().unwrap();
    assert!(probe(address, "/v2/health/live").is_err(), "a process is still listening");
}

#[test]
fn a_signal_to_the_operator_alone_ends_all_processes_in_order() {
    for signal in ["TERM", "INT"] {
        let run = Process::start(&mut local(&[])).unwrap();
        example(&run);
        let parts = parts(&run);
        run.signal(signal).unwrap();
        let ended = run.wait(STOP_LIMIT).unwrap();
        assert!(ended.status.success(), "{signal}: {:?}\n{}", ended.status, ended.output);
        await_end_of(&parts);
    }
}

#[test]
fn killing_the_operator_ends_all_its_processes() {
    let run = Process::start(&mut local(&[])).unwrap();
    example(&run);
    let parts = parts(&run);
    run.signal("KILL").unwrap();
    await_end_of(&parts);
}

#[test]
fn replicas_share_the_processors_unless_the_resource_sets_the_threads() {
    for (setting, threads) in
        [(None, None), (Some("engine.pluginConfig.INFERENCE_NUM_THREADS='7'"), Some("7"))]
    {
        let settings = setting.map(|setting| vec!["--set", setting]).unwrap_or_default();
        let run = Process::start(&mut local(&settings)).unwrap();
        example(&run);
        let all = std::thread::available_parallelism().unwrap().get();
        let threads = threads.map_or_else(|| (all / 2).max(1).to_string(), str::to_owned);
        let (server, _) = parts(&run)[1];
        let command = std::fs::read_to_string(format!("/proc/{server}/cmdline")).unwrap();
        assert!(command.contains(&format!("--plugin-config=INFERENCE_NUM_THREADS={threads}\0")), "{command}");
    }
}

#[test]
fn a_permanent_error_ends_it_immediately_with_one_message() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let directory = tempfile::tempdir().unwrap();
    let broken = directory.path().join("broken.gguf");
    std::fs::write(&broken, "this is no model").unwrap();
    let broken = broken.to_str().unwrap();
    let gone = directory.path().join("gone.gguf");
    let gone = gone.to_str().unwrap();
    for (arguments, mentions) in [
        (vec!["--port", &port], vec!["router", "in use", &port]),
        (vec!["--model", gone], vec!["--model: ", gone]),
        (vec!["--model", broken, "--set", "engine.extraArgs=[]"], vec!["replica-", broken]),
        (vec!["--set", "engine.extraArgs=[--max-itl=some]"], vec!["replica-", "'some'", "--max-itl"]),
        (vec!["--set", "engine.maxNumSeq=1"], vec!["unknown field spec.engine.maxNumSeq"]),
        (vec!["--server", gone], vec!["the program", gone]),
    ] {
        let ended = Process::start(&mut local(&arguments)).unwrap().wait(LIMIT).unwrap();
        assert_eq!(ended.status.code(), Some(1), "{arguments:?}: {}", ended.output);
        let errors: Vec<&str> = ended.output.lines().filter(|line| line.contains("error:")).collect();
        let [error] = errors[..] else { panic!("{arguments:?}: {}", ended.output) };
        assert!(mentions.iter().all(|mentioned| error.contains(mentioned)), "{mentions:?}: {error}");
    }
}
