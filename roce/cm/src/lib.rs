//! IB communication management: MADs and the connection manager's state machine (sans-IO).
