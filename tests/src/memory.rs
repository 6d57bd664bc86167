//! Memory limits of child processes, enforced by control groups, and the memory usage that the kernel reports.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context as _, bail};

/// A control group with a memory limit. Dropping it removes the group, which must be empty.
#[derive(Debug)]
pub struct MemoryLimit {
    directory: PathBuf,
}

impl MemoryLimit {
    /// Creates a control group whose memory is limited to `bytes`.
    ///
    /// # Errors
    /// No memory controller is writable. Write access requires root or a delegated control group.
    pub fn new(bytes: u64) -> anyhow::Result<Self> {
        static CREATED: AtomicU32 = AtomicU32::new(0);
        let name =
            format!("ovfleet-tests-{}-{}", std::process::id(), CREATED.fetch_add(1, Ordering::Relaxed));
        let (root, limit_file) = controller()?;
        let directory = root.join(name);
        fs::create_dir(&directory).with_context(|| format!("failed to create {}", directory.display()))?;
        let limit = Self { directory };
        limit.write(limit_file, &bytes.to_string())?;
        Ok(limit)
    }

    /// Wraps `command` so that it runs inside this group from the start.
    #[must_use]
    pub fn wrap(&self, command: &Command) -> Command {
        let mut wrapped = Command::new("sh");
        wrapped.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]);
        wrapped.arg(self.directory.join("cgroup.procs"));
        wrapped.arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => wrapped.env(name, value),
                None => wrapped.env_remove(name),
            };
        }
        wrapped
    }

    fn write(&self, file: &str, text: &str) -> anyhow::Result<()> {
        let path = self.directory.join(file);
        fs::write(&path, text).with_context(|| format!("failed to write {}", path.display()))
    }
}

impl Drop for MemoryLimit {
    fn drop(&mut self) {
        // If the last process is still exiting, the removal fails. The group then remains, but uses no memory after the
        // process has exited.
        drop(fs::remove_dir(&self.directory));
    }
}

/// The root of the memory controller (version 1 or 2), and the name of the file that contains a group's limit.
fn controller() -> anyhow::Result<(&'static Path, &'static str)> {
    let (first, second) = (Path::new("/sys/fs/cgroup/memory"), Path::new("/sys/fs/cgroup"));
    if first.join("memory.limit_in_bytes").exists() {
        return Ok((first, "memory.limit_in_bytes"));
    }
    let controllers = fs::read_to_string(second.join("cgroup.subtree_control")).unwrap_or_default();
    if controllers.split_whitespace().any(|name| name == "memory") {
        return Ok((second, "memory.max"));
    }
    bail!("no memory controller is available below {}", second.display())
}

/// The memory usage of a process in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessMemory {
    /// The resident anonymous memory, which excludes mapped files.
    pub anonymous: u64,
    /// The peak of resident memory since the start or the last [`reset_peak`], including mapped files.
    pub peak: u64,
}

/// Returns the memory usage of process `id`.
///
/// # Errors
/// The process does not exist.
pub fn of_process(id: u32) -> anyhow::Result<ProcessMemory> {
    parse(&fs::read_to_string(format!("/proc/{id}/status"))?)
}

/// Resets [`ProcessMemory::peak`] of process `id` to its current resident memory.
///
/// # Errors
/// The process does not exist, or belongs to another user.
pub fn reset_peak(id: u32) -> anyhow::Result<()> {
    const RESET_PEAK: &str = "5";
    let path = format!("/proc/{id}/clear_refs");
    fs::write(&path, RESET_PEAK).with_context(|| format!("failed to write {path}"))
}

fn parse(status: &str) -> anyhow::Result<ProcessMemory> {
    let kibibytes = |name: &str| -> anyhow::Result<u64> {
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .with_context(|| format!("{name} is missing"))?;
        let mut words = line.trim_start_matches(':').split_whitespace();
        let number = words.next().with_context(|| format!("{name} has no number"))?;
        Ok(number.parse::<u64>()? << 10)
    };
    Ok(ProcessMemory { anonymous: kibibytes("RssAnon")?, peak: kibibytes("VmHWM")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_the_status_file_of_the_kernel() {
        let memory =
            parse("Name:\tx\nVmHWM:\t    2048 kB\nRssAnon:\t    1024 kB\n").expect("both values are present");
        assert_eq!(memory, ProcessMemory { anonymous: 1 << 20, peak: 2 << 20 });
        assert!(parse("Name:\tx\n").is_err());
        assert!(of_process(std::process::id()).expect("this process exists").peak > 0);
    }

    #[test]
    fn resetting_lowers_the_peak() {
        const BYTES: usize = 256 << 20;
        let id = std::process::id();
        drop(std::hint::black_box(vec![1_u8; BYTES]));
        let peak = of_process(id).expect("this process exists").peak;
        reset_peak(id).expect("the process belongs to this user");
        let after = of_process(id).expect("this process exists").peak;
        assert!(peak >= BYTES as u64 && after < peak, "{peak} {after}");
    }
}
