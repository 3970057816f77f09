//! The RC transport engine: lifecycle, requester, completer, responder, timers (sans-IO).
