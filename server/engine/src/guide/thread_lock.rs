//! A reentrant lock whose guard shares the ownership of the lock.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

/// Lets one thread at a time use the data that the states of a [`Guide`](crate::Guide) share. A thread can acquire the
/// lock several times.
#[derive(Debug, Default)]
pub struct ThreadLock {
    owner: Mutex<Option<Owner>>,
    freed: Condvar,
}

#[derive(Debug)]
struct Owner {
    thread: ThreadId,
    guards: u32,
}

/// Releases the lock when it is dropped, on the thread that acquired it.
#[derive(Debug)]
pub struct ThreadGuard(Arc<ThreadLock>);

impl ThreadLock {
    /// Acquires the lock, and waits while another thread holds it.
    pub fn lock(self: &Arc<Self>) -> ThreadGuard {
        let is_locked = |owner: &mut Option<Owner>| owner.as_ref().is_some_and(Owner::is_other);
        let owner = self.freed.wait_while(self.owner(), is_locked);
        self.acquire(owner.unwrap_or_else(PoisonError::into_inner))
    }

    /// Acquires the lock without waiting. `None` if another thread holds it.
    pub fn try_lock(self: &Arc<Self>) -> Option<ThreadGuard> {
        let owner = self.owner();
        if owner.as_ref().is_some_and(Owner::is_other) { None } else { Some(self.acquire(owner)) }
    }

    fn acquire(self: &Arc<Self>, mut owner: MutexGuard<'_, Option<Owner>>) -> ThreadGuard {
        let thread = std::thread::current().id();
        owner.get_or_insert(Owner { thread, guards: 0 }).guards += 1;
        ThreadGuard(Arc::clone(self))
    }

    fn owner(&self) -> MutexGuard<'_, Option<Owner>> {
        // No code panics while the mutex is locked.
        self.owner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Owner {
    fn is_other(&self) -> bool {
        self.thread != std::thread::current().id()
    }
}

impl Drop for ThreadGuard {
    fn drop(&mut self) {
        let mut owner = self.0.owner();
        if let Some(Owner { guards, .. }) = &mut *owner {
            *guards -= 1;
            if *guards == 0 {
                *owner = None;
                self.0.freed.notify_one();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_can_lock_several_times_and_others_wait_for_the_last_guard() {
        let lock = Arc::new(ThreadLock::default());
        let (first, second) = (lock.lock(), lock.try_lock().expect("the same thread has the lock"));
        let can_others_lock = || {
            let lock = Arc::clone(&lock);
            std::thread::spawn(move || lock.try_lock().is_some()).join().expect("the thread does not panic")
        };
        assert!(!can_others_lock());
        drop(first);
        assert!(!can_others_lock());
        let waiting = Arc::clone(&lock);
        let waiting = std::thread::spawn(move || drop(waiting.lock()));
        drop(second);
        waiting.join().expect("the thread does not panic");
        assert!(can_others_lock());
    }
}
