//! What is attacked: a router with API keys and the server behind it, each under a memory limit.

use std::io::Write as _;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde_json::json;
use tests::memory::{self, MemoryLimit, ProcessMemory};
use tests::process::Process;
use tests::router::Router;
use tests::server::{Server, admin_address, command};

use super::attacks::forms;
use super::client::{Client, MODEL, Targets, chat, completion, copies, response, text};

/// Memory that each process may use.
const MEMORY_BYTES: u64 = 2 << 30;
/// Memory that may remain after an attack, in percent of the memory before all attacks.
const REMAINING_PERCENT: u64 = 110;
/// Memory that may remain in any case, less than 2 % of the limit: the router has so little that 10 % of it are less than
/// what an allocator retains of a few large bodies until its threads are busy again.
const REMAINING_BYTES_MIN: u64 = 32 << 20;
/// How long memory may take to fall after an attack.
const SETTLE_LIMIT: Duration = Duration::from_secs(60);
/// How long requests may finish after a signal to end.
const DRAIN_SECONDS: u64 = 3;
const ATTACKER_KEY: &str = "attacker-0123456789";
const OTHER_KEY: &str = "bystander-0123456789";

/// Something for the router and something for the server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Both<T> {
    pub(crate) router: T,
    pub(crate) server: T,
}

impl<T> Both<T> {
    pub(crate) fn map<U>(self, mut map: impl FnMut(T) -> U) -> Both<U> {
        Both { router: map(self.router), server: map(self.server) }
    }
}

/// The processes and the limits that they run under.
pub(crate) struct Fleet {
    // Dropped in this order: a control group can be removed once its processes have ended.
    router: Router,
    server: Server,
    _limits: Both<MemoryLimit>,
    _keys: tempfile::NamedTempFile,
}

impl Fleet {
    pub(crate) fn start() -> anyhow::Result<Self> {
        let mut keys = tempfile::NamedTempFile::new()?;
        writeln!(keys, "{ATTACKER_KEY} attacker\n{OTHER_KEY} bystander")?;
        let limits =
            Both { router: MemoryLimit::new(MEMORY_BYTES)?, server: MemoryLimit::new(MEMORY_BYTES)? };
        let drain = format!("{DRAIN_SECONDS}s");
        let kept = tests::server::kept();
        // Without a second copy of the weights in f32, which is made only some time after the start.
        let arguments = [
            ["--model-name", MODEL],
            ["--kv-cache-size", "256MiB"],
            ["--unpack-weights", "never"],
            ["--cache-dir", &kept],
            ["--admin-port", "0"],
            ["--drain-timeout", &drain],
        ];
        let server = Server::from_command(&mut limits.server.wrap(&command(&arguments.concat())?))?;
        let arguments = [
            tests::router::replica(&server),
            "--admin-port=0".to_owned(),
            format!("--api-keys={}", keys.path().display()),
            format!("--drain-timeout={drain}"),
        ];
        let router = Router::from_command(&mut limits.router.wrap(&tests::router::command(&arguments)?))?;
        Ok(Self { router, server, _limits: limits, _keys: keys })
    }

    pub(crate) fn targets(&self) -> Targets {
        Targets {
            router: self.router.address().to_owned(),
            server: self.server.address().to_owned(),
            key: ATTACKER_KEY.to_owned(),
            other_key: OTHER_KEY.to_owned(),
        }
    }

    /// A well-behaved client.
    pub(crate) fn client(&self) -> Client {
        Client::new(self.router.address(), OTHER_KEY)
    }

    fn processes(&self) -> Both<&Process> {
        Both { router: self.router.process(), server: self.server.process() }
    }

    /// The addresses that a kubelet would probe.
    pub(crate) fn probed(&self) -> [String; 2] {
        let Both { router, server } = self.processes().map(admin_address);
        [router, server]
    }

    /// The memory of both processes.
    pub(crate) fn memory(&self) -> anyhow::Result<Both<ProcessMemory>> {
        let of = |name: &str, process: &Process| {
            memory::of_process(process.id())
                .with_context(|| format!("the {name} has exited: {}", last_lines(process)))
        };
        let Both { router, server } = self.processes();
        Ok(Both { router: of("router", router)?, server: of("server", server)? })
    }

    /// Makes the peaks of memory start anew.
    pub(crate) fn reset_peaks(&self) -> anyhow::Result<()> {
        let Both { router, server } = self.processes();
        memory::reset_peak(router.id())?;
        memory::reset_peak(server.id())
    }

    /// Fills the KV cache and sends the largest ordinary requests, so that memory is that of a busy fleet: the engine
    /// retains the buffers of its largest step, and compiled forms are cached.
    pub(crate) async fn warm_up(&self) -> anyhow::Result<()> {
        let client = self.client();
        let prompts = (0..8).map(|number| {
            completion(&format!("{number} ").repeat(1300), json!({"max_tokens": 2})).to_string()
        });
        client.barrage("/v1/completions", 8, prompts.collect()).await.only(&[200])?;
        let choices = completion("Once upon a time", json!({"n": 128, "max_tokens": 2, "logprobs": 5}));
        client.barrage("/v1/completions", 1, copies(&choices, 1)).await.only(&[200])?;
        let words: Vec<String> = (0..4096).map(|number| format!("word {number}")).collect();
        let compiled = [json!({"guided_choice": words}), json!({"guided_regex": "([a-z]{1,8} ){1,100}"})];
        let compiled = compiled.map(|form| chat("Choose.", form).to_string()).to_vec();
        client.barrage("/v1/chat/completions", 2, compiled).await.only(&[200])?;
        // The cache of compiled forms, which has a limit of its own, is full.
        forms::exponential_patterns(self.targets()).await?;
        forms::exhausted_form_again(self.targets()).await?;
        Ok(())
    }

    /// Waits until both processes have little more memory than they had before.
    pub(crate) async fn settled(&self, before: Both<ProcessMemory>) -> anyhow::Result<Both<ProcessMemory>> {
        let end = Instant::now() + SETTLE_LIMIT;
        let mut poll = tokio::time::interval(Duration::from_millis(100));
        loop {
            poll.tick().await;
            let now = self.memory()?;
            let is_back = |now: ProcessMemory, before: ProcessMemory| {
                let percentage = before.anonymous * REMAINING_PERCENT / 100;
                now.anonymous <= percentage.max(before.anonymous + REMAINING_BYTES_MIN)
            };
            if is_back(now.router, before.router) && is_back(now.server, before.server) {
                return Ok(now);
            }
            let mebibytes = |memory: Both<ProcessMemory>| {
                format!("{} + {} MiB", memory.router.anonymous >> 20, memory.server.anonymous >> 20)
            };
            ensure!(
                Instant::now() < end,
                "memory stays at {}; it was {} before the attacks",
                mebibytes(now),
                mebibytes(before)
            );
        }
    }

    /// Fails if a process has panicked.
    pub(crate) fn check_logs(&self) -> anyhow::Result<()> {
        let Both { router, server } = self.processes();
        for (name, process) in [("router", router), ("server", server)] {
            let output = process.output();
            let panic = output.lines().find(|line| line.contains("panicked"));
            ensure!(panic.is_none(), "the {name} panicked: {}", panic.unwrap_or_default());
        }
        Ok(())
    }

    /// Signals both to end while long responses are generated, in the background and as streams. Both must end with
    /// success soon after the drain timeout.
    pub(crate) async fn stop(self) -> anyhow::Result<String> {
        let client = self.client();
        let long = json!({"background": true, "max_output_tokens": 6000, "ignore_eos": true});
        for _ in 0..8 {
            let (status, body) =
                client.post("/v1/responses", &response(&json!("Tell a story."), long.clone())).await?;
            ensure!(status == 200, "a response in the background: {status} {body:.300}");
            text(&body, "/id")?;
        }
        // The limit has room for cutting off requests, storing responses, and ending the engine.
        let limit = Duration::from_secs(DRAIN_SECONDS + 17);
        let start = Instant::now();
        self.server.process().signal("TERM")?;
        let ended = tokio::task::spawn_blocking(move || -> anyhow::Result<_> {
            let server = self.server.wait()?;
            let elapsed = start.elapsed();
            self.router.process().signal("TERM")?;
            Ok((server, elapsed, self.router.wait()?))
        });
        let (server, elapsed, router) = ended.await??;
        ensure!(server.status.success(), "the server ended with {}: {}", server.status, server.output);
        ensure!(router.status.success(), "the router ended with {}: {}", router.status, router.output);
        ensure!(elapsed < limit, "the server took {elapsed:.1?} to end");
        Ok(format!("8 background responses: the server ended after {elapsed:.1?}"))
    }
}

fn last_lines(process: &Process) -> String {
    let output = process.output();
    let lines: Vec<&str> = output.lines().rev().take(20).collect();
    lines.into_iter().rev().collect::<Vec<_>>().join("\n")
}
