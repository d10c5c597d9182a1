//! Copies of layers to the device that have been started and may still run.

use std::sync::Arc;

use kvdock_kernels::{KernelError, Transfer};

use crate::cache::pool::Transfers;

/// Copies that may still run. Those of a device that copies at once are never among them.
#[derive(Default)]
pub(super) struct Coming {
    copies: Vec<Piece>,
}

struct Piece {
    /// The model's layer.
    layer: usize,
    /// The pool's buffer.
    buffer: usize,
    transfer: Arc<dyn Transfer>,
}

impl std::fmt::Debug for Coming {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.copies.iter().map(|copy| copy.layer)).finish()
    }
}

/// Whether nothing has to wait for it any more.
fn is_done(transfer: &dyn Transfer) -> bool {
    transfer.is_done().unwrap_or(false)
}

impl Coming {
    /// Takes in the copies of a layer.
    pub fn add(&mut self, layer: usize, transfers: Transfers) {
        self.forget_done();
        for (buffer, transfer) in transfers {
            if !is_done(&*transfer) {
                self.copies.push(Piece { layer, buffer, transfer: transfer.into() });
            }
        }
    }

    /// Lets what the device is told to compute from now on wait for a layer.
    pub fn before_layer(&self, layer: usize) -> Result<(), KernelError> {
        let mut of_layer = self.copies.iter().filter(|copy| copy.layer == layer);
        of_layer.try_for_each(|copy| copy.transfer.before_layer(copy.buffer))
    }

    /// All of them.
    pub fn all(&self) -> Vec<Arc<dyn Transfer>> {
        self.copies.iter().map(|copy| Arc::clone(&copy.transfer)).collect()
    }

    /// Lets go of those that have run.
    pub fn forget_done(&mut self) {
        self.copies.retain(|copy| !is_done(&*copy.transfer));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use kvdock_kernels::Arrived;
    use smallvec::smallvec;

    use super::*;

    #[derive(Default)]
    struct Slow {
        done: AtomicBool,
        asked: AtomicUsize,
    }

    /// Shares a [`Slow`] with the test.
    struct Handle(Arc<Slow>);

    impl Transfer for Handle {
        fn before_layer(&self, layer: usize) -> Result<(), KernelError> {
            self.0.asked.fetch_add(1 + layer, Ordering::Relaxed);
            Ok(())
        }

        fn is_done(&self) -> Result<bool, KernelError> {
            Ok(self.0.done.load(Ordering::Relaxed))
        }

        fn wait(&self) -> Result<(), KernelError> {
            self.0.done.store(true, Ordering::Relaxed);
            Ok(())
        }
    }

    #[test]
    fn a_layer_waits_for_its_own_copies_until_they_have_run() {
        let slow = Arc::new(Slow::default());
        let mut coming = Coming::default();
        coming.add(4, smallvec![(2, Box::new(Handle(Arc::clone(&slow))) as Box<dyn Transfer>)]);
        coming.add(5, smallvec![(3, Box::new(Arrived) as Box<dyn Transfer>)]);
        coming.before_layer(5).unwrap();
        assert_eq!(slow.asked.load(Ordering::Relaxed), 0, "another layer's");
        coming.before_layer(4).unwrap();
        assert_eq!(slow.asked.load(Ordering::Relaxed), 1 + 2, "by the number of the buffer");
        assert_eq!(coming.all().len(), 1, "what was over when it began is not kept");
        coming.all().iter().for_each(|transfer| transfer.wait().unwrap());
        coming.before_layer(4).unwrap();
        assert_eq!(slow.asked.load(Ordering::Relaxed), 2 * (1 + 2), "it is waited for until it is known to have run");
        coming.forget_done();
        assert!(coming.all().is_empty());
    }
}
