//! The attacked fleet: a router with API keys and the server behind it, each under a memory limit.

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

/// The memory limit of each process.
const MEMORY_BYTES: u64 = 2 << 30;
/// The maximum memory after an attack, in percent of the memory before the first attack.
const REMAINING_PERCENT: u64 = 110;
/// The growth of memory that is always allowed, about 3% of the limit. The router uses so little memory that 10% of it
/// is less than an allocator retains after a few large bodies. The server uses about 160 MiB less before the attacks if
/// it has just trimmed its memory, and then 10% is less than the fragments that ten thousand connections leave.
const REMAINING_BYTES_MIN: u64 = 64 << 20;
/// The time limit for memory to be freed after an attack.
const SETTLE_LIMIT: Duration = Duration::from_secs(60);
/// The drain timeout of both processes.
const DRAIN_SECONDS: u64 = 3;
const ATTACKER_KEY: &str = "attacker-0123456789";
const OTHER_KEY: &str = "bystander-0123456789";

/// A pair of values, one for the router and one for the server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PerProcess<T> {
    pub(crate) router: T,
    pub(crate) server: T,
}

impl<T> PerProcess<T> {
    pub(crate) fn map<U>(self, mut map: impl FnMut(T) -> U) -> PerProcess<U> {
        PerProcess { router: map(self.router), server: map(self.server) }
    }
}

/// The processes and the limits that they run under.
pub(crate) struct Fleet {
    // Fields are dropped in declaration order, so the processes end before their control groups are removed, as the
    // kernel requires.
    router: Router,
    server: Server,
    _limits: PerProcess<MemoryLimit>,
    _keys: tempfile::NamedTempFile,
}

impl Fleet {
    pub(crate) fn start() -> anyhow::Result<Self> {
        let mut keys = tempfile::NamedTempFile::new()?;
        writeln!(keys, "{ATTACKER_KEY} attacker\n{OTHER_KEY} bystander")?;
        let limits =
            PerProcess { router: MemoryLimit::new(MEMORY_BYTES)?, server: MemoryLimit::new(MEMORY_BYTES)? };
        let drain = format!("{DRAIN_SECONDS}s");
        let cache_dir = tests::server::cache_dir();
        let arguments = [
            ["--model-name", MODEL],
            ["--kv-cache-size", "256MiB"],
            ["--cache-dir", &cache_dir],
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
            server_grpc: self.server.grpc_address(),
            key: ATTACKER_KEY.to_owned(),
            other_key: OTHER_KEY.to_owned(),
        }
    }

    /// Returns a well-behaved client.
    pub(crate) fn client(&self) -> Client {
        Client::new(self.router.address(), OTHER_KEY)
    }

    fn processes(&self) -> PerProcess<&Process> {
        PerProcess { router: self.router.process(), server: self.server.process() }
    }

    /// The addresses that a kubelet would probe.
    pub(crate) fn probed(&self) -> [String; 2] {
        let PerProcess { router, server } = self.processes().map(admin_address);
        [router, server]
    }

    /// The memory of both processes.
    pub(crate) fn memory(&self) -> anyhow::Result<PerProcess<ProcessMemory>> {
        let of = |name: &str, process: &Process| {
            memory::of_process(process.id())
                .with_context(|| format!("the {name} has exited: {}", last_lines(process)))
        };
        let PerProcess { router, server } = self.processes();
        Ok(PerProcess { router: of("router", router)?, server: of("server", server)? })
    }

    /// Resets the memory peaks of both processes.
    pub(crate) fn reset_peaks(&self) -> anyhow::Result<()> {
        let PerProcess { router, server } = self.processes();
        memory::reset_peak(router.id())?;
        memory::reset_peak(server.id())
    }

    /// Fills the KV cache and sends the largest ordinary requests, so that the baseline is the memory of a busy fleet:
    /// the engine retains the buffers of its largest step and caches compiled forms.
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
        // Fill the cache of compiled forms, which has its own limit.
        forms::exponential_patterns(self.targets()).await?;
        forms::exhausted_form_again(self.targets()).await?;
        Ok(())
    }

    /// Waits until the memory of both processes is within the allowed growth. A client continues to send requests,
    /// because the router's allocator returns free memory only when the router allocates or frees memory.
    pub(crate) async fn settled(
        &self,
        before: PerProcess<ProcessMemory>,
    ) -> anyhow::Result<PerProcess<ProcessMemory>> {
        let end = Instant::now() + SETTLE_LIMIT;
        let client = self.client();
        loop {
            let (status, body) =
                client.post("/v1/chat/completions", &chat("Hi", json!({"max_tokens": 1}))).await?;
            ensure!(status == 200, "after the attack, another client got status {status}: {body:.300}");
            let now = self.memory()?;
            let is_back = |now: ProcessMemory, before: ProcessMemory| {
                let percentage = before.anonymous * REMAINING_PERCENT / 100;
                now.anonymous <= percentage.max(before.anonymous + REMAINING_BYTES_MIN)
            };
            if is_back(now.router, before.router) && is_back(now.server, before.server) {
                return Ok(now);
            }
            let mebibytes = |memory: PerProcess<ProcessMemory>| {
                format!("{} + {} MiB", memory.router.anonymous >> 20, memory.server.anonymous >> 20)
            };
            ensure!(
                Instant::now() < end,
                "the router and the server still use {} after {SETTLE_LIMIT:?} (before the attacks: {}; allowed \
                 growth of each process: {}% or {} MiB, whichever is more)",
                mebibytes(now),
                mebibytes(before),
                REMAINING_PERCENT - 100,
                REMAINING_BYTES_MIN >> 20
            );
        }
    }

    /// Fails if a process has panicked.
    pub(crate) fn check_logs(&self) -> anyhow::Result<()> {
        let PerProcess { router, server } = self.processes();
        for (name, process) in [("router", router), ("server", server)] {
            let output = process.output();
            let panic = output.lines().find(|line| line.contains("panicked"));
            ensure!(panic.is_none(), "the {name} panicked: {}", panic.unwrap_or_default());
        }
        Ok(())
    }

    /// Sends SIGTERM to the server while long background responses are generated, and then to the router. Both
    /// processes must exit successfully, and the server must exit soon after the drain timeout.
    pub(crate) async fn stop(self) -> anyhow::Result<String> {
        let client = self.client();
        let long = json!({"background": true, "max_output_tokens": 6000, "ignore_eos": true});
        for _ in 0..8 {
            let (status, body) =
                client.post("/v1/responses", &response(&json!("Tell a story."), long.clone())).await?;
            ensure!(status == 200, "failed to start a background response: {status} {body:.300}");
            text(&body, "/id")?;
        }
        // The limit includes time for aborting requests, storing responses and stopping the engine.
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
        ensure!(server.status.success(), "the server exited with {}: {}", server.status, server.output);
        ensure!(router.status.success(), "the router exited with {}: {}", router.status, router.output);
        ensure!(elapsed < limit, "the server exited {elapsed:.1?} after SIGTERM (limit: {limit:?})");
        Ok(format!("8 background responses: the server exited {elapsed:.1?} after SIGTERM"))
    }
}

fn last_lines(process: &Process) -> String {
    let output = process.output();
    let lines: Vec<&str> = output.lines().rev().take(20).collect();
    lines.into_iter().rev().collect::<Vec<_>>().join("\n")
}
