//! Transports that change a few methods of another transport.

use std::fmt;
use std::sync::Arc;

use crate::native::NativeCollectives;
use crate::shm_group::ShmGroup;
use crate::{
    Abort, AbortDecision, Allocation, Cause, ChannelId, Combine, Fingerprint, Inbox, Incoming, LazyDeadline,
    Outgoing, Progress, Rank, Result, Runtime, StartedCount, Store, StoreError, Traffic, Transport,
};

/// A [`Transport`] that passes every call on to an inner transport, except the methods that it overrides.
///
/// ```
/// use dist_transport::forwarding::ForwardingTransport;
/// use dist_transport::{Fingerprint, Runtime, Transport, sim};
///
/// /// A transport that counts calls.
/// #[derive(Debug)]
/// struct Counting(sim::SimTransport, usize);
///
/// impl ForwardingTransport for Counting {
///     type Inner = sim::SimTransport;
///
///     fn inner(&self) -> &Self::Inner {
///         &self.0
///     }
///
///     fn inner_mut(&mut self) -> &mut Self::Inner {
///         &mut self.0
///     }
///
///     fn begin(&mut self, call: &Fingerprint) {
///         self.1 += 1;
///         self.0.begin(call);
///     }
/// }
///
/// let mut alone = Counting(sim::network(&Runtime::system(), 1).remove(0), 0);
/// let transport: &mut dyn Transport = &mut alone;
/// transport.begin(&Fingerprint([1; 48]));
/// assert_eq!((transport.rank().index(), alone.1), (0, 1));
/// ```
pub trait ForwardingTransport: Send + fmt::Debug {
    /// The type of the inner transport.
    type Inner: Transport + ?Sized;

    /// Returns the inner transport.
    fn inner(&self) -> &Self::Inner;

    /// Like [`inner`](Self::inner), but mutable.
    fn inner_mut(&mut self) -> &mut Self::Inner;

    /// See [`Transport::begin`].
    fn begin(&mut self, call: &Fingerprint) {
        self.inner_mut().begin(call);
    }

    /// See [`Transport::announce`].
    fn announce(&mut self, call: &Fingerprint) {
        self.inner_mut().announce(call);
    }

    /// See [`Transport::set_started_count`].
    fn set_started_count(&mut self, count: &StartedCount) {
        self.inner_mut().set_started_count(count);
    }

    /// See [`Transport::exchange`].
    ///
    /// # Errors
    /// As there.
    fn exchange(
        &mut self,
        send: Option<Outgoing<'_>>,
        receive: Option<Incoming<'_>>,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        self.inner_mut().exchange(send, receive, due)
    }

    /// See [`Transport::exchange_in_place`].
    ///
    /// # Errors
    /// As there.
    fn exchange_in_place(
        &mut self,
        peer: usize,
        buffer: &mut [u8],
        combine: &mut Combine<'_>,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        self.inner_mut().exchange_in_place(peer, buffer, combine, due)
    }

    /// See [`Transport::exchange_all`].
    ///
    /// # Errors
    /// As there.
    fn exchange_all(
        &mut self,
        sends: &[Outgoing<'_>],
        receives: &mut [Incoming<'_>],
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        self.inner_mut().exchange_all(sends, receives, due)
    }

    /// See [`Transport::exchange_matched`].
    ///
    /// # Errors
    /// As there.
    fn exchange_matched(
        &mut self,
        sends: &[(Fingerprint, Outgoing<'_>)],
        inbox: &mut dyn Inbox,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        self.inner_mut().exchange_matched(sends, inbox, due)
    }

    /// See [`Transport::wait_any_peer`].
    ///
    /// # Errors
    /// As there.
    fn wait_any_peer(&mut self, peers: &[usize], due: &LazyDeadline<'_>) -> Result<Vec<usize>> {
        self.inner_mut().wait_any_peer(peers, due)
    }

    /// See [`Transport::unread`].
    fn unread(&mut self) -> Option<usize> {
        self.inner_mut().unread()
    }

    /// See [`Transport::cores`].
    fn cores(&self) -> usize {
        self.inner().cores()
    }

    /// See [`Transport::fork`].
    ///
    /// # Errors
    /// As there.
    fn fork(&mut self, members: &[usize]) -> Result<Option<Box<dyn Transport>>> {
        self.inner_mut().fork(members)
    }

    /// See [`Transport::fork_local`].
    ///
    /// # Errors
    /// As there.
    fn fork_local(&mut self, members: &[usize], number: u64) -> Result<Box<dyn Transport>> {
        self.inner_mut().fork_local(members, number)
    }

    /// See [`Transport::abort`].
    fn abort(&mut self, cause: Cause) {
        self.inner_mut().abort(cause);
    }

    /// See [`Transport::aborted`].
    fn aborted(&self) -> Option<Abort> {
        self.inner().aborted()
    }

    /// See [`Transport::abort_decision`].
    fn abort_decision(&self) -> Option<Arc<dyn AbortDecision>> {
        self.inner().abort_decision()
    }

    /// See [`Transport::traffic`].
    fn traffic(&self) -> Traffic {
        self.inner().traffic()
    }

    /// See [`Transport::shm_group`].
    ///
    /// # Errors
    /// As there.
    fn shm_group(&mut self, due: &LazyDeadline<'_>) -> Result<Option<&mut dyn ShmGroup>> {
        self.inner_mut().shm_group(due)
    }

    /// See [`Transport::native`].
    fn native(&mut self) -> Option<&mut dyn NativeCollectives> {
        self.inner_mut().native()
    }

    /// See [`Transport::allocate`].
    fn allocate(&mut self, bytes: usize) -> Option<Allocation> {
        self.inner_mut().allocate(bytes)
    }

    /// See [`Transport::store`].
    ///
    /// # Errors
    /// As there.
    fn store(&self) -> Result<Store, StoreError> {
        self.inner().store()
    }
}

impl<T: ForwardingTransport> Transport for T {
    fn rank(&self) -> Rank {
        self.inner().rank()
    }

    fn members(&self) -> &[usize] {
        self.inner().members()
    }

    fn channel(&self) -> ChannelId {
        self.inner().channel()
    }

    fn runtime(&self) -> &Runtime {
        self.inner().runtime()
    }

    fn begin(&mut self, call: &Fingerprint) {
        ForwardingTransport::begin(self, call);
    }

    fn announce(&mut self, call: &Fingerprint) {
        ForwardingTransport::announce(self, call);
    }

    fn exchange(
        &mut self,
        send: Option<Outgoing<'_>>,
        receive: Option<Incoming<'_>>,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        ForwardingTransport::exchange(self, send, receive, due)
    }

    fn exchange_in_place(
        &mut self,
        peer: usize,
        buffer: &mut [u8],
        combine: &mut Combine<'_>,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        ForwardingTransport::exchange_in_place(self, peer, buffer, combine, due)
    }

    fn exchange_all(
        &mut self,
        sends: &[Outgoing<'_>],
        receives: &mut [Incoming<'_>],
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        ForwardingTransport::exchange_all(self, sends, receives, due)
    }

    fn exchange_matched(
        &mut self,
        sends: &[(Fingerprint, Outgoing<'_>)],
        inbox: &mut dyn Inbox,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        ForwardingTransport::exchange_matched(self, sends, inbox, due)
    }

    fn wait_any_peer(&mut self, peers: &[usize], due: &LazyDeadline<'_>) -> Result<Vec<usize>> {
        ForwardingTransport::wait_any_peer(self, peers, due)
    }

    fn unread(&mut self) -> Option<usize> {
        ForwardingTransport::unread(self)
    }

    fn hosts(&self) -> Vec<u64> {
        self.inner().hosts()
    }

    fn cores(&self) -> usize {
        ForwardingTransport::cores(self)
    }

    fn fork(&mut self, members: &[usize]) -> Result<Option<Box<dyn Transport>>> {
        ForwardingTransport::fork(self, members)
    }

    fn fork_local(&mut self, members: &[usize], number: u64) -> Result<Box<dyn Transport>> {
        ForwardingTransport::fork_local(self, members, number)
    }

    fn abort(&mut self, cause: Cause) {
        ForwardingTransport::abort(self, cause);
    }

    fn aborted(&self) -> Option<Abort> {
        ForwardingTransport::aborted(self)
    }

    fn abort_decision(&self) -> Option<Arc<dyn AbortDecision>> {
        ForwardingTransport::abort_decision(self)
    }

    fn traffic(&self) -> Traffic {
        ForwardingTransport::traffic(self)
    }

    fn shm_group(&mut self, due: &LazyDeadline<'_>) -> Result<Option<&mut dyn ShmGroup>> {
        ForwardingTransport::shm_group(self, due)
    }

    fn native(&mut self) -> Option<&mut dyn NativeCollectives> {
        ForwardingTransport::native(self)
    }

    fn allocate(&mut self, bytes: usize) -> Option<Allocation> {
        ForwardingTransport::allocate(self, bytes)
    }

    fn store(&self) -> Result<Store, StoreError> {
        ForwardingTransport::store(self)
    }

    fn set_progress(&mut self, progress: Progress) {
        self.inner_mut().set_progress(progress);
    }

    fn set_started_count(&mut self, count: &StartedCount) {
        ForwardingTransport::set_started_count(self, count);
    }

    fn set_call_formatter(&mut self, describe: fn(&Fingerprint) -> Option<String>) {
        self.inner_mut().set_call_formatter(describe);
    }
}

/// A boxed transport is a transport, such as one from [`fork`](Transport::fork).
impl<T: Transport + ?Sized> ForwardingTransport for Box<T> {
    type Inner = T;

    fn inner(&self) -> &T {
        self
    }

    fn inner_mut(&mut self) -> &mut T {
        self
    }
}
